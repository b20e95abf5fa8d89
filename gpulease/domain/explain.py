"""Explains the queue: why jobs wait, when they start, what would start them now, whose turn it is.

All answers come from `plan`: the order is its order, an expected start comes from its forward run,
and a suggestion is a claim that it grants.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from gpulease.domain.forecast import FAR, Start, forecast
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, order_after, order_of, plan
from gpulease.domain.queue import Order, Queue
from gpulease.domain.queue_options import PolicyName
from gpulease.domain.snapshot import capacity, ledgers
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
        self.kept_from: Mapping[JobId, datetime] = _kept_from(decided, self.order, self.starts)
        """From when on memory is kept free for jobs: for those with a reservation from now on."""
        self.late: Set[JobId] = frozenset(_late(decided))
        """The jobs that have run longer than predicted."""
        self.newest = max((job.id for job in decided.snapshot.jobs), default=JobId(0))
        """Jobs with higher ids are unknown to the plan."""


def _kept_from(
    decided: Plan, waiting: Sequence[Job], starts: Mapping[JobId, Start]
) -> dict[JobId, datetime]:
    snapshot = decided.snapshot
    found = {each.job: snapshot.at for each in decided.reservations}
    if snapshot.policy.name is not PolicyName.FAIR:
        return found
    queue = Queue(capacity(decided.gpus))
    ahead: list[tuple[datetime, datetime]] = []
    """When older jobs are due, and until when they wait."""
    aging = [
        (job.queue.aging_since_at, job.id, queue.need_of(job))
        for job in waiting
        if job.queue.aging_since_at is not None and not job.queue.preemptible
    ]
    for since, job_id, need in sorted(aging, key=itemgetter(0, 1)):
        due = since + timedelta(seconds=need.due_after_s(snapshot.history, snapshot.policy))
        # Memory is kept for one job at a time, the oldest, if it still waits.
        is_oldest = not any(each <= due < until for each, until in ahead)
        if due > snapshot.at and is_oldest:
            found.setdefault(job_id, due)
        ahead.append((due, starts[job_id].latest if job_id in starts else FAR))
    return found


def _late(decided: Plan) -> Iterator[JobId]:
    snapshot, queue = decided.snapshot, Queue(capacity(decided.gpus))
    for job in decided.after.jobs:
        if job.holds_memory and job.started_at is not None:
            ran_s = (snapshot.at - job.started_at).total_seconds()
            if ran_s > queue.need_of(job).run_time(snapshot.history):
                yield job.id


def run_time_of(decided: Plan, job: Job) -> timedelta:
    """Return the predicted run time of a job, at most its time limit."""
    need = Queue(capacity(decided.gpus)).need_of(job)
    snapshot = decided.snapshot
    return timedelta(seconds=need.run_time(snapshot.history))


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

    There are none if it would start as it is: the plan that grants it is still to come.

    Args:
        decided: the latest plan.
        job: the job, which may be unknown to the plan.
        smallest: the smallest lease, in bytes.
    """

    def starts(claim: Claim) -> bool:
        return start_of(decided, replace(job, claim=claim)) is not None

    if starts(job.claim):
        return ()
    fewer = (
        _change(job.claim, starts, f"--gpus {gpus}", gpus=gpus)
        for gpus in range(job.claim.gpus - 1, 0, -1)
    )
    found = (
        _less_memory(decided, job.claim, starts, smallest),
        _less_time(decided, job, starts),
        next(filter(None, fewer), None),
        _change(job.claim, starts, "no --exclusive", exclusive=False),
        _any_gpu(job.claim, starts),
        *_less_of_host(decided, job.claim, starts),
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
    return Suggestion(f"--mem {smaller.size}", smaller)


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


def _change(claim: Claim, starts: _Starts, options: str, **fields: object) -> Suggestion | None:
    """Suggest other values of some fields, if they are others and the job would start with them."""
    changed = replace(claim, **fields)  # type: ignore[arg-type]
    return Suggestion(options, changed) if changed != claim and starts(changed) else None


def _less_of_host(decided: Plan, claim: Claim, starts: _Starts) -> Iterator[Suggestion | None]:
    """Suggest the RAM and the cores that are free, where a job asks for more."""
    ram, cores = round_down_size(max(0, decided.host.ram or 0)), decided.host.cores
    if _STEP <= ram < (claim.ram or 0):
        yield _change(claim, starts, f"--ram {format_size(ram)}", ram=ram)
    if 0 < cores < (claim.cpus or 0):
        yield _change(claim, starts, f"--cpus {cores}", cpus=cores)


def _any_gpu(claim: Claim, starts: _Starts) -> Suggestion | None:
    """Suggest the GPUs that were not asked for: each wish alone, then all together."""
    wishes: dict[str, dict[str, Any]] = {
        "--gpu": {"named": ()},
        "--gpu-model": {"model": None},
        "--min-vram": {"min_vram": None},
        "--same-model": {"same_model": False},
        "--linked": {"linked": False},
    }
    given = {
        option: without for option, without in wishes.items() if replace(claim, **without) != claim
    }
    together = {field: value for without in given.values() for field, value in without.items()}
    ways = [*given.items(), (", ".join(given), together)] if len(given) > 1 else given.items()
    found = (_change(claim, starts, f"no {options}", **without) for options, without in ways)
    return next(filter(None, found), None)


@dataclass(frozen=True, slots=True)
class UserStanding:
    """One user in the queue."""

    user: str
    use: float
    """Byte-seconds of leases that have ended and that are held, decayed."""
    share: float
    """The part of all use that counts for the order, 0 to 1: held leases count for longer."""
    factor: float
    """The share relative to an equal one, which the cost of the user's jobs is multiplied by."""
    held: int
    """Bytes leased now, over all GPUs."""
    running: int
    """Jobs and holds that hold memory."""
    waiting: int
    """Jobs and holds that wait."""
    turn: int | None
    """The place of the user's next job among those of all users, from 1; None: nothing can start
    however much memory is free."""
    next_job: Job | None
    """That job."""


def standings(plan: Plan) -> list[UserStanding]:
    """Return every user with recent use or jobs; those with a turn first, in that order."""
    snapshot = plan.snapshot
    now_s = snapshot.at.timestamp()
    past = snapshot.use.at(now_s)
    largest = capacity(ledgers(snapshot))
    queue = snapshot.queue or Queue.of(snapshot.jobs, largest)
    order = Order(queue, now_s, snapshot.policy, snapshot.history, past)
    # The job of each user that goes next, in the order of the queue.
    first: dict[str, Job] = {}
    for job in order_of(snapshot, plan.reservations):
        if job.owner.user not in first and plan.limits.exceeded_by(job) is None:
            first[job.owner.user] = job
    turns = {user: (place, job) for place, (user, job) in enumerate(first.items(), 1)}
    waiting = Counter(job.owner.user for job in snapshot.jobs if not job.holds_memory)
    held: dict[str, list[Job]] = {}
    for job in snapshot.jobs:
        if job.holds_memory:
            held.setdefault(job.owner.user, []).append(job)
    found = [
        UserStanding(
            user=user,
            use=order.used.get(user, 0.0) * largest,
            share=order.shares.share(user),
            factor=order.shares.factor(user),
            held=sum(lease.memory for job in held.get(user, ()) for lease in job.leases),
            running=len(held.get(user, ())),
            waiting=waiting[user],
            turn=turns[user][0] if user in turns else None,
            next_job=turns[user][1] if user in turns else None,
        )
        for user in order.used.keys() | waiting.keys() | held.keys()
    ]
    return sorted(found, key=lambda each: (each.turn is None, each.turn or 0, each.user))
