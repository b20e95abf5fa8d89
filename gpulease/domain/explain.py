"""Explains why jobs wait: position, expected start, and the change that would start a job now.

All answers come from `plan`: the order is its order, an expected start comes from its forward run,
and a suggestion is a claim that it grants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from gpulease.domain.forecast import Start, forecast
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, order_after, plan
from gpulease.domain.queue import Queue
from gpulease.domain.snapshot import capacity
from gpulease.units import MIB, format_size, format_span, round_down_size

_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_STEP = 128 * MIB
"""Of the search for a size."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of the options of a job with which it would start now."""

    options: str
    """As on the command line, such as --mem 6G."""
    claim: Claim
    before: JobId | None = None
    """The job with the reservation that it would start before."""


class Explanations:
    """What one plan says about the order and the starts of the jobs that wait after it."""

    def __init__(self, decided: Plan, index: Queue | None = None) -> None:
        """`index` has the waiting jobs that may start; None: it is made."""
        self.plan = decided
        self.order: Sequence[Job] = order_after(decided, index)
        """The waiting jobs in the order in which the next pass tries them."""
        self.positions: Mapping[JobId, int] = {
            job.id: place
            for place, job in enumerate(
                (job for job in self.order if decided.limits.exceeded_by(job) is None), 1
            )
        }
        """The place of each job in that order that nothing blocks, 1 for the first."""
        self.starts: Mapping[JobId, Start] = forecast(decided, self.order)
        """The predicted starts of the first jobs in that order."""
        self.newest = max((job.id for job in decided.snapshot.jobs), default=JobId(0))
        """Jobs with higher ids are unknown to the plan."""


def run_time_of(decided: Plan, job: Job) -> timedelta:
    """Return the predicted run time of a job, at most its time limit."""
    need = Queue(capacity(decided.gpus)).need_of(job)
    snapshot = decided.snapshot
    return timedelta(seconds=need.run_time(snapshot.history, snapshot.policy))


def with_job(decided: Plan, job: Job) -> Plan:
    """Return the plan that would follow if `job` were in the queue.

    The other waiting jobs stay as they are: what fits has started.
    """
    kept = [each for each in decided.committed_jobs if each.id != job.id]
    return plan(replace(decided.after, jobs=[*kept, job]))


def start_of(decided: Plan, job: Job) -> Placement | None:
    """Return where `job` would start now; None if it would wait."""
    return dict(with_job(decided, job).grants).get(job.id)


def suggestions(decided: Plan, job: Job, smallest: int) -> tuple[Suggestion, ...]:
    """Return the single changes with which a waiting job would start now.

    Args:
        decided: the latest plan.
        job: the job, which may be unknown to the plan.
        smallest: the smallest lease, in bytes.
    """

    def starts(claim: Claim) -> bool:
        return start_of(decided, replace(job, claim=claim)) is not None

    found = (
        _less_memory(decided, job.claim, starts, smallest),
        _less_time(decided, job, starts),
        _fewer_gpus(job.claim, starts),
        _sharing(job.claim, starts),
        _any_gpu(job.claim, starts),
    )
    return tuple(each for each in found if each is not None)


_Starts = Callable[[Claim], bool]


def _less_memory(decided: Plan, claim: Claim, starts: _Starts, smallest: int) -> Suggestion | None:
    """Suggest the largest size that would start now, found by binary search."""
    low, high = 0, -(-claim.memory_on(capacity(decided.gpus)) // _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        if starts(replace(claim, memory=middle * _STEP)):
            low = middle
        else:
            high = middle
    size = round_down_size(low * _STEP)
    smaller = replace(claim, memory=size)
    if size < smallest or not starts(smaller):
        return None
    return Suggestion(f"--mem {format_size(size)}", smaller)


def _less_time(decided: Plan, job: Job, starts: _Starts) -> Suggestion | None:
    """Suggest the longest time limit that ends before a reservation or a window begins."""
    at = decided.snapshot.at
    ends: list[tuple[timedelta, JobId | None]] = [
        (window.begins_at - at, None) for window in decided.snapshot.windows
    ]
    ends += (
        (timedelta(seconds=each.at_s - at.timestamp()), each.job)
        for each in decided.reservations
        if each.job != job.id
    )
    for left, before in sorted(ends, key=lambda end: end[0], reverse=True):
        limit = left // (step := _HOUR if left >= _DAY else _MINUTE) * step
        if limit < _MINUTE or limit >= (job.claim.time_limit or timedelta.max):
            continue
        claim = replace(job.claim, time_limit=limit)
        if starts(claim):
            text = format_span(limit).replace(" ", "")
            return Suggestion(f"--time {text}", claim, before)
    return None


def _fewer_gpus(claim: Claim, starts: _Starts) -> Suggestion | None:
    for gpus in range(claim.gpus - 1, 0, -1):
        fewer = replace(claim, gpus=gpus)
        if starts(fewer):
            return Suggestion(f"--gpus {gpus}", fewer)
    return None


def _sharing(claim: Claim, starts: _Starts) -> Suggestion | None:
    shared = replace(claim, exclusive=False)
    return Suggestion("no --exclusive", shared) if claim.exclusive and starts(shared) else None


def _any_gpu(claim: Claim, starts: _Starts) -> Suggestion | None:
    """Suggest the GPUs that were not asked for: each wish alone, then all together."""
    wishes: dict[str, dict[str, Any]] = {
        "--gpu": {"named": ()},
        "--gpu-model": {"model": None},
        "--min-vram": {"min_vram": None},
        "--same-model": {"same_model": False},
    }
    given = {
        option: without for option, without in wishes.items() if replace(claim, **without) != claim
    }
    together = {field: value for without in given.values() for field, value in without.items()}
    ways = [*given.items(), (", ".join(given), together)] if len(given) > 1 else given.items()
    for options, without in ways:
        if starts(wider := replace(claim, **without)):
            return Suggestion(f"no {options}", wider)
    return None
