"""Why a job waits and how it ended, as sentences and numbers.

In a long queue most jobs wait for the same reason: `WaitReasonCache` draws it once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpulease.domain.eligibility import Block
from gpulease.domain.explain import Explanations, run_time_of, suggestions
from gpulease.domain.forecast import Start
from gpulease.domain.gpu import JobId, job_title
from gpulease.domain.job import AT_A_LIMIT, QUEUED_AGAIN, Exit, Job, Outcome
from gpulease.domain.lease import Claim, State
from gpulease.domain.placement import Obstacle, ObstacleKind, Placement, Refusal
from gpulease.domain.plan import Plan, WaitReason, why_waiting
from gpulease.errors import EXIT_TIME_LIMIT, split_hint
from gpulease.server.view_sources import claim_view, instant, rounded_up, whole_minute
from gpulease.service.ports import Store
from gpulease.service.scheduler import Rehearsal
from gpulease.units import format_size
from gpulease.wire.jobs import ExpectedStartView, ExplainView, RefusalView, SuggestionView
from gpulease.wire.requests import spoken


def reason(job: Job, wait_reason: str | None = None) -> tuple[str | None, str | None]:
    """Return why a job waits or why it ended, without a full stop, and a hint if there is one."""
    match job.state:
        case State.QUEUED:
            return wait_reason, None
        case State.GRANTED | State.ACTIVE:
            if job.main_exited_at is None:
                return None, None
            how = "" if job.exit is None else f" ({job.exit})"
            left = "the processes that it left behind keep the lease"
            return f"its main process has ended{how}; {left}", None
        case State.RELEASING:
            why, hint = split_hint(job.detail or "asked to end")
            if job.holder is not None:
                return why, hint
            again = "it is queued again when its processes have ended"
            rest = again if job.outcome in QUEUED_AGAIN else "its processes are still running"
            return f"{why}; {rest}", hint
        case State.ENDED:
            return split_hint(job.detail) if job.detail else (_ending(job), None)


def _ending(job: Job) -> str | None:
    if job.outcome in (Outcome.EXITED, Outcome.SIGNALED) and job.exit is not None:
        return job.exit.verb
    return spoken(job.outcome) if job.outcome else None


def exit_status(job: Job) -> int | None:
    """Return the exit status as a shell shows it; None before the end, or if it never ran."""
    if job.state is not State.ENDED:
        return None
    known = job.exit or Exit()
    return shell_status(job.outcome, known.code, known.signal)


def shell_status(outcome: str | None, code: int | None, signal: int | None) -> int | None:
    """Return the exit status of an ended job as a shell shows it; None if it never ran."""
    if outcome in AT_A_LIMIT:
        return EXIT_TIME_LIMIT
    return Exit(code, signal).status


@dataclass(frozen=True, slots=True)
class WaitExplanation:
    """Why a queued job waits, as of one plan."""

    why: str | None
    refusals: list[RefusalView]
    waits_for: list[int]
    behind: int | None
    """The job with the reservation that keeps GPUs from it."""
    waits_for_labels: list[str]
    """Empty if people see the same numbers."""
    behind_label: str | None


class WaitReasonCache:
    """Why jobs wait, as of the latest plan."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._drawn: dict[int, WaitExplanation] = {}
        """By the identity of the reason in the plan."""

    def of(self, job: Job, plan: Plan) -> WaitExplanation:
        """Return why a queued job waits."""
        if plan is not self._plan:
            self._plan, self._drawn = plan, {}
        waits = plan.reason(job)
        drawn = self._drawn.get(id(waits))
        if drawn is None:
            drawn = self._drawn[id(waits)] = explanation(job.claim, waits, len(plan.gpus))
        return drawn


def explanation(claim: Claim, waiting: WaitReason, gpus: int) -> WaitExplanation:
    """Return a reason as numbers and sentences, on a machine with so many GPUs."""
    refusal = waiting.refusal
    reserved = (each for each in refusal.reasons if each.kind is ObstacleKind.RESERVED)
    behind = next((job for each in reserved for job in each.waits_for), None)
    # Jobs that give memory back do not have to end.
    waits_for = () if waiting.asks_back else refusal.waits_for
    labels = refusal.labels_of(waits_for)
    return WaitExplanation(
        why_it_waits(claim, waiting, gpus),
        [
            RefusalView(each.gpu, each.index, each.why, each.label, each.kind.value)
            for each in refusal.obstacles
        ],
        list(waits_for),
        behind,
        [] if labels == [*map(str, waits_for)] else labels,
        None if behind is None else refusal.labels_of([behind])[0],
    )


def expected_start(
    job: JobId, explained: Explanations, first: Start | None, store: Store
) -> ExpectedStartView | None:
    """Return when a job probably starts; `first` is the first prediction for it, if known."""
    start, kept_from = explained.starts.get(job), explained.kept_from.get(job)
    if start is None and kept_from is None:
        return None
    now, after = explained.plan.snapshot.at, None if start is None else start.after
    ends = None if after is None else store.live_job(after)
    from_at, until_at = (None, None) if start is None else _rounded(start, now)
    return ExpectedStartView(
        instant(from_at),
        instant(until_at),
        after,
        None if ends is None or ends.label == str(after) else ends.label,
        after_is_late=after in explained.late,
        is_late=first is not None and first.latest < now,
        kept_free_from_at=instant(kept_from and whole_minute(kept_from)),
    )


def start_shown(start: Start) -> datetime:
    """Return the instant of a start; one that is predicted is not exact, and is rounded up."""
    return start.at if start.is_certain else whole_minute(start.at)


_GRAINS = tuple(
    (timedelta(hours=hours), timedelta(minutes=minutes)) for hours, minutes in ((1, 1), (12, 10))
)
"""The grain of ranges that end within a span."""


def _rounded(start: Start, now: datetime) -> tuple[datetime, datetime]:
    """Return the range of a start in its grain; a stream of jobs shows each change."""
    left = start.latest - now
    grain = next((grain for span, grain in _GRAINS if left <= span), timedelta(hours=1))
    if start.is_certain:
        return start.at, start.at
    earliest = rounded_up(start.earliest, grain)
    return earliest - grain * (earliest > start.earliest), rounded_up(start.latest, grain)


def block_sentence(block: Block, store: Store) -> str:
    """Return what blocks a job as text; it names jobs as people do."""
    return block.sentence({each.job: label_of(store, each.job) for each in block.after})


def label_of(store: Store, job_id: JobId) -> str:
    """Return the id of a job as people see it."""
    job = store.job(job_id)
    return str(job_id) if job is None else job.label


_STAY = (
    ObstacleKind.LOST, ObstacleKind.UNREADABLE, ObstacleKind.PROHIBITED, ObstacleKind.DRAINED,
)  # fmt: skip
"""Obstacles that the end of a lease does not remove."""


def why_it_waits(claim: Claim, waiting: WaitReason, gpus: int) -> str | None:
    """Return why a claim has not been granted on a machine with so many GPUs."""
    if gpus < claim.gpus:
        return f"it asks for {claim.gpus} GPUs, and the driver shows {gpus} now"
    if waiting.over_limit is not None:
        return str(waiting.over_limit)
    if waiting.asks_back:
        excess = format_size(sum(each.excess for each in waiting.asks_back))
        jobs = sorted({job for each in waiting.asks_back for job in each.waits_for})
        labels = ", ".join(waiting.refusal.labels_of(jobs))
        return f"waits for job{'s' * (len(jobs) > 1)} {labels} to give back {excess}"
    host = waiting.refusal.host
    if host is not None and len(waiting.refusal.fits) >= claim.gpus:
        return host.why
    # Its guarantee is enough for it to start.
    why = _why_no_gpu(replace(claim, memory_bound=None), waiting.refusal)
    return why if host is None else "; ".join(filter(None, (why, host.why)))


def _why_no_gpu(claim: Claim, refusal: Refusal) -> str | None:
    obstacles = refusal.obstacles
    stay = [each for each in obstacles if each.kind in _STAY]
    able = [each for each in obstacles if each.kind not in (*_STAY, ObstacleKind.NOT_ASKED_FOR)]
    if stay and len(able) + len(refusal.fits) < claim.gpus:
        return _by_gpu(stay)
    if any(each.kind is ObstacleKind.NOT_LINKED for each in obstacles):
        return f"needs {claim}, and no {claim.gpus} of those with room are linked by NVLink"
    leased = [each for each in obstacles if each.kind in (ObstacleKind.LEASED, ObstacleKind.EXCESS)]
    if leased:
        return _what_is_missing(claim, leased, len(refusal.fits))
    busy = [each for each in obstacles if each.kind is ObstacleKind.BUSY]
    if busy:
        return f"the GPUs with room for {claim} are busy until {_one_of(busy)} ends"
    reserved = [each for each in obstacles if each.waits_for]
    if reserved:
        return f"waits its turn behind {_one_of(reserved)}"
    # None just after submission: the next pass is moments away, and most jobs never wait.
    asked_for = [each for each in obstacles if each.kind is not ObstacleKind.NOT_ASKED_FOR]
    return _by_gpu(asked_for or obstacles)


def _what_is_missing(claim: Claim, leased: Sequence[Obstacle], fitting: int) -> str | None:
    if claim.exclusive:
        return f"needs {'a GPU' if claim.gpus == 1 else f'{claim.gpus} GPUs'} without other jobs"
    gaps = [each.gap for each in leased if each.gap is not None]
    if not gaps:
        return _by_gpu(leased)
    if claim.gpus > 1:
        found = f"{fitting or 'no'} {'GPU has' if fitting < 2 else 'GPUs have'}"
        return f"needs {claim}, and {found} that free now"
    free = f"at most {format_size(max(gaps))}" if max(gaps) else "nothing"
    return f"needs {claim}, and {free} is free on a GPU now"


def _by_gpu(obstacles: Sequence[Obstacle]) -> str | None:
    labels_by_why: dict[str, list[str]] = {}
    for each in obstacles:
        labels_by_why.setdefault(each.why, []).append(each.label)
    parts = (
        f"{'GPU' if len(labels) == 1 else 'GPUs'} {', '.join(labels)}: {why}"
        for why, labels in labels_by_why.items()
    )
    return "; ".join(parts) or None


def _one_of(obstacles: Sequence[Obstacle]) -> str:
    slurm = {job: each.slurm.get(job) for each in obstacles for job in each.waits_for}
    if len(slurm) > 1:
        return f"one of {len(slurm)} jobs"
    ((job, number),) = slurm.items()
    return job_title(Refusal(tuple(obstacles)).labels_of([job])[0], number)


def explain_view(rehearsal: Rehearsal, smallest: int, store: Store) -> ExplainView:
    """Return what would happen to a job, as a wire object."""
    plan, job = rehearsal.plan, rehearsal.job
    placement = dict(plan.grants).get(job.id)
    view = _view(plan, job, placement)
    if placement is not None:
        return view
    if job.state is State.ENDED:
        view.never_starts, view.reason = True, job.detail
        return view
    explained = Explanations(plan)
    if not rehearsal.closed:
        start = explained.starts.get(job.id)
        view.expected_start_at = None if start is None else instant(start_shown(start))
        view.expected_start = expected_start(job.id, explained, None, store)
    if (block := plan.blocked.get(job.id)) is not None:
        view.reason = block_sentence(block, store)
        view.begin_at = instant(block.begin_at)
        return view
    view.position = explained.positions.get(job.id)
    view.suggestions = [
        SuggestionView(each.options, each.before) for each in suggestions(plan, job, smallest)
    ]
    view.preempts = [preempted for preempted, wanted_by in plan.preempts if wanted_by == job.id]
    if view.preempts:
        view.waits_for = view.preempts
        return view
    waits = explanation(job.claim, why_waiting(plan, job), len(plan.gpus))
    view.reason = rehearsal.closed or waits.why
    view.refusals = waits.refusals
    view.waits_for = waits.waits_for
    view.behind = waits.behind
    view.waits_for_labels = waits.waits_for_labels
    view.behind_label = waits.behind_label
    return view


def _view(plan: Plan, job: Job, placement: Placement | None) -> ExplainView:
    labels = {gpu.uuid: gpu.reading.label for gpu in plan.gpus}
    allocations = () if placement is None else placement.allocations
    return ExplainView(
        starts_now=placement is not None,
        gpus=[labels[uuid] for uuid, _ in allocations],
        claim=claim_view(job.claim, {gpu.uuid: gpu.reading for gpu in plan.gpus}),
        sized=job.usage.size_reason,
        runs_for=run_time_of(plan, job) / timedelta(seconds=1),
        reason=None,
        position=None,
        expected_start_at=None,
        refusals=[],
        waits_for=[],
        behind=None,
        suggestions=[],
    )
