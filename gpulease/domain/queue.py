"""The live jobs as a planning pass needs them: waiting jobs in groups, and what each one costs.

Waiting jobs of one user that differ in nothing but their age form a group. A pass scores and tries
only the first job of a group: if that does not fit, no other does. The index is kept up to date
from pass to pass, so a pass over ten thousand waiting jobs takes milliseconds.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.past_jobs import HALF_LIFE, Keys, RunTimes, Shares, decayed, keys_of
from gpulease.domain.queue_options import PolicyName, Priority, QueuePolicy

FIRST = JobId(0)
"""Stands for all other jobs: of its owner, or of everyone if an admin moved it."""
_ABOVE_ALL = 1e300
_STEP = 1e-9
"""Relative difference of the merits of jobs that follow each other by a move."""


_Key = JobId | tuple[str, JobId]
"""A job, for its merit; or a user and a job, for the most merit of that job."""


class Moves:
    """The merit of waiting jobs after moves (`gpulease move`), as one pass sees them.

    A user who moves a job lets others sink behind it, so that no other user waits longer. An admin
    lets the job rise to the place of the other one.
    """

    def __init__(
        self,
        moved: Iterable[Job],
        jobs: Mapping[JobId, Job],
        own_merit: Callable[[Job], float],
        factor: Callable[[str], float],
    ) -> None:
        """Take what makes the score of a job: its own merit, divided by the factor of its user."""
        self._jobs = jobs
        self._own_merit = own_merit
        self._factor = factor
        self._movers: dict[tuple[str, JobId], list[JobId]] = {}
        """The jobs that users moved, by user and by the job that they go before."""
        self._values: dict[_Key, float] = {}
        for job in moved:
            if not job.queue.moved_by_admin:
                key = job.owner.user, job.queue.moved_before or FIRST
                self._movers.setdefault(key, []).append(job.id)

    def merit(self, job: Job) -> float:
        """Return the merit of a waiting job after all moves.

        Chains of moves are as long as the queue, so this does not recurse.
        """
        left: list[_Key] = [job.id]
        begun = set[_Key]()
        while left:
            key = left[-1]
            if key in self._values:
                left.pop()
            elif key not in begun:
                begun.add(key)
                left += [each for each in self._depends_on(key) if each not in begun]
            else:
                self._values[key] = self._value(key)
        return self._values[job.id]

    def _depends_on(self, key: _Key) -> Sequence[_Key]:
        """Return the values that one follows from."""
        if isinstance(key, tuple):
            return self._movers[key]
        job = self._jobs[key]
        bounds, target = self._bounds_of(job), job.queue.moved_before
        if job.queue.moved_by_admin and target is not None and target in self._jobs:
            return [*bounds, target]
        return bounds

    def _bounds_of(self, job: Job) -> list[tuple[str, JobId]]:
        """Return the keys of what a job must not exceed: others of its owner go before it."""
        user, options = job.owner.user, job.queue
        is_first = options.moved_before == FIRST and not options.moved_by_admin
        keys = [(user, job.id)] if is_first else [(user, job.id), (user, FIRST)]
        return [key for key in keys if key in self._movers]

    def _value(self, key: _Key) -> float:
        # A later move undoes earlier ones in a circle; if one is left, a part has no effect.
        if isinstance(key, tuple):
            least = min(self._values.get(mover, _ABOVE_ALL) for mover in self._movers[key])
            return least - abs(least) * _STEP
        job = self._jobs[key]
        merit = self._own_merit(job)
        if job.queue.moved_by_admin:
            merit = max(merit, self._place_of(job.queue.moved_before, job.owner.user))
        bounds = (self._values.get(bound, _ABOVE_ALL) for bound in self._bounds_of(job))
        return min(merit, *bounds, _ABOVE_ALL)

    def _place_of(self, target: JobId | None, user: str) -> float:
        """Return the merit with which a job of `user` is just before another one."""
        if target == FIRST:
            return _ABOVE_ALL
        if target is None or target not in self._values:
            return -math.inf  # it does not wait any more
        equal = self._values[target] * self._factor(user)
        equal /= self._factor(self._jobs[target].owner.user)
        return equal + abs(equal) * _STEP


RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
PREEMPTIBLE_RANKS = range(len(RANKS), 2 * len(RANKS))
"""Preemptible jobs come after all others, in the order of their classes."""
_AFTER_ALL = 1 << 62
# In simulations, other values of these changed no goal of `make bench-scheduling`.
AGE_OFFSET_S = 4 * 3600.0
"""Added to the age of a job in its score. A job without age has a score too, so that short jobs
precede long ones at once."""
SMALLEST_SHARE = 0.05
"""A share of use below this counts as this, relative to an equal share. It bounds how far a rare
user precedes others."""
ASSUMED_UTILIZATION = 0.3
"""The utilization of a job while no run at all is known."""
_UNKNOWN_S = 4 * 3600.0
"""The prediction until the first job of the machine has ended."""
_SHORTEST_S = 1.0
"""No prediction is shorter: a score divides by it."""
_NICE_HALVES = 10.0
"""The score halves with so many steps of nice."""

Turn = tuple[int, int, int]
"""Orders the jobs of one user: by id, but a job that was moved goes just before another."""


def turn_of(job: Job) -> Turn:
    """Return the place of a job among the jobs of its owner; preemptible jobs come last."""
    before = job.queue.moved_before
    if before is None:
        return job.id + _AFTER_ALL * job.queue.preemptible, 1, job.id
    return before, 0, job.id


@dataclass(frozen=True, slots=True)
class Need:
    """What decides how a job is planned, besides its age."""

    user: str
    claim: Claim
    rank: int
    """Of its priority class; the lowest goes first. Preemptible jobs come after all others."""
    nice: int
    keys: Keys
    """The series that its run time is predicted from."""
    weight: float
    """The memory that it claims, in GPUs."""
    limit_s: float | None
    patience: float
    """The factor of its nice value on the score."""

    @property
    def preemptible(self) -> bool:
        return self.rank in PREEMPTIBLE_RANKS

    def run_time(self, history: RunTimes) -> float:
        """Return the predicted run time in seconds, never above the time limit."""
        known = history.seconds(self.keys)
        if known is None:
            known = _UNKNOWN_S
        known = max(known, _SHORTEST_S)
        return known if self.limit_s is None else min(known, self.limit_s)

    def due_after_s(self, history: RunTimes, policy: QueuePolicy) -> float:
        """Return the age in seconds from which memory is reserved for the job.

        It is a multiple of the job's own length, so that a short job on all GPUs does not wait for
        a day behind an endless stream of others.
        """
        most = policy.soft_reservation_after.total_seconds()
        return min(policy.reservation_slowdown * self.run_time(history), most)

    def longest_s(self, history: RunTimes, policy: QueuePolicy) -> float:
        """Return the time limit, or the longest run time to expect without one, in seconds."""
        if self.limit_s is not None:
            return self.limit_s
        return policy.backfill_factor * self.run_time(history)

    def utilization(self, history: RunTimes) -> float:
        """Return the usual utilization of each GPU, 0 to 1, or the assumed one."""
        known = history.utilization(self.keys)
        return ASSUMED_UTILIZATION if known is None else known


@dataclass(slots=True, eq=False)
class Group:
    """Waiting jobs with the same need, in the order of their user."""

    need: Need
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Holding:
    """A job that holds memory."""

    job: Job
    need: Need
    start_s: float
    """When it started, in seconds."""


def gpus_leased(job: Job, capacity: int) -> float:
    """Return the memory of a job's leases, in GPUs of so many bytes.

    Its claim says less: an exclusive job has all memory of the GPUs that it is on, and a share is
    one of these GPUs, whatever the largest GPU of the machine is.
    """
    return sum(lease.memory for lease in job.leases) / max(1, capacity)


def share_of(claim: Claim, capacity: int) -> float:
    """Return the part that a claim takes of a GPU of so many bytes, above 0."""
    if claim.exclusive:
        return 1.0
    return max(1, claim.memory_on(capacity)) / max(1, capacity)


class Queue:
    """The live jobs, indexed for planning."""

    def __init__(self, capacity: int) -> None:
        """Take the allocatable bytes of the largest GPU, which costs are relative to."""
        self.capacity = capacity
        self.jobs: dict[JobId, Job] = {}
        """The jobs that wait and may start."""
        self.holding: dict[JobId, Holding] = {}
        self.groups: dict[Claim, dict[Hashable, Group]] = {}
        """The groups of waiting jobs, by claim."""
        self.turns: dict[str, list[Turn]] = {}
        """The waiting jobs of each user, in the order of that user."""
        self.order: list[JobId] = []
        """The waiting jobs in the order of submission."""
        self.impatient: dict[JobId, datetime] = {}
        """When jobs with a longest wait leave the queue."""
        self.moved: dict[JobId, Job] = {}
        """The jobs that go before another one by request."""
        self.aging: dict[str, set[JobId]] = {}
        """The waiting jobs of each user that gain age: few of them."""
        self._needs: dict[JobId, Need] = {}

    @classmethod
    def of(cls, jobs: Iterable[Job], capacity: int) -> "Queue":
        """Return an index of these jobs."""
        queue = cls(capacity)
        for job in jobs:
            queue.add(job)
        return queue

    def update(self, jobs: Iterable[Job]) -> None:
        """Make these the indexed jobs; those that are the same objects as before cost nothing."""
        current = {job.id: job for job in jobs}
        for gone in [job for job in (*self.jobs, *self.holding) if job not in current]:
            self.remove(gone)
        waiting = self.jobs
        for job_id, job in current.items():
            if waiting.get(job_id) is not job:
                self.add(job)

    def add(self, job: Job) -> None:
        """Add a job, or replace its former state."""
        if self.jobs.get(job.id) is job:
            return
        held = self.holding.get(job.id)
        if held is not None and held.job is job:
            return
        self.remove(job.id)
        if job.holds_memory:
            begun = job.started_at or job.granted_at or job.submitted_at
            self.holding[job.id] = Holding(job, self.need_of(job), begun.timestamp())
        else:
            self._queue(job)

    def _queue(self, job: Job) -> None:
        groups = self.groups.setdefault(job.claim, {})
        key = _group_key(job)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(self.need_of(job))
        need = self._needs[job.id] = group.need
        turn = turn_of(job)
        insort(group.turns, turn)
        insort(self.turns.setdefault(need.user, []), turn)
        insort(self.order, job.id)
        self.jobs[job.id] = job
        if job.gives_up_at is not None:
            self.impatient[job.id] = job.gives_up_at
        if job.queue.moved_before is not None:
            self.moved[job.id] = job
        if job.queue.aging_since_at is not None:
            self.aging.setdefault(need.user, set()).add(job.id)

    def remove(self, job_id: JobId) -> None:
        """Remove a job, if it is there."""
        self.holding.pop(job_id, None)
        job = self.jobs.pop(job_id, None)
        if job is None:
            return
        need = self._needs.pop(job_id)
        self.impatient.pop(job_id, None)
        self.moved.pop(job_id, None)
        if job.queue.aging_since_at is not None:
            self.aging[need.user].discard(job_id)
        turn = turn_of(job)
        _discard(self.order, job_id)
        _discard(self.turns[need.user], turn)
        if not self.turns[need.user]:
            del self.turns[need.user]
            self.aging.pop(need.user, None)
        groups, key = self.groups[job.claim], _group_key(job)
        _discard(groups[key].turns, turn)
        if not groups[key].turns:
            del groups[key]
        if not groups:
            del self.groups[job.claim]

    def need(self, job: Job) -> Need:
        """Return what decides how a waiting job of this index is planned."""
        return self._needs[job.id]

    def need_of(self, job: Job) -> Need:
        """Return what decides how `job` is planned."""
        share, limit = share_of(job.claim, self.capacity), job.claim.time_limit
        return Need(
            job.owner.user,
            job.claim,
            RANKS[job.queue.priority] + len(RANKS) * job.queue.preemptible,
            job.queue.nice,
            keys_of(job.owner.user, job.claim, share, job.usage.fingerprint),
            job.claim.gpus * share,
            None if limit is None else limit.total_seconds(),
            2.0 ** (-job.queue.nice / _NICE_HALVES),
        )


def _group_key(job: Job) -> Hashable:
    """Return what waiting jobs with one claim have in common if they have one need.

    A job that was moved is alone.
    """
    options, moved = job.queue, None if job.queue.moved_before is None else job.id
    ranked = options.priority, options.preemptible, options.nice
    return job.owner.user, *ranked, job.usage.fingerprint, moved


_T = TypeVar("_T", JobId, Turn)


def _discard(items: list[_T], item: _T) -> None:
    index = bisect_left(items, item)
    if index < len(items) and items[index] == item:
        del items[index]


class Order:
    """The order in which waiting jobs are tried, at one instant."""

    def __init__(
        self,
        queue: Queue,
        now_s: float,
        policy: QueuePolicy,
        history: RunTimes,
        use: Mapping[str, float],
    ) -> None:
        """Take the decayed use of each user by jobs that have ended."""
        self._queue = queue
        self._now_s = now_s
        self._history = history
        self._is_fair = policy.name is PolicyName.FAIR
        self._horizon_s = HALF_LIFE.total_seconds()
        self.used: dict[str, float] = {}
        """The decayed use of each user until now, in GPU-seconds."""
        self.shares = self._shares_of(queue, use)
        self._moves = (
            Moves(
                queue.moved.values(),
                queue.jobs,
                lambda job: self._own_merit(queue.need(job), job),
                self.factor,
            )
            if queue.moved
            else None
        )

    def _shares_of(self, queue: Queue, past: Mapping[str, float]) -> Shares:
        use = dict(past)
        self.used = dict(past)
        for held in queue.holding.values():
            user, rate = held.need.user, gpus_leased(held.job, queue.capacity)
            granted_at = held.job.granted_at
            granted_s = held.start_s if granted_at is None else granted_at.timestamp()
            since = min(granted_s, self._now_s)
            ran = decayed(rate, since, self._now_s, self._now_s, self._horizon_s)
            self.used[user] = self.used.get(user, 0.0) + ran
            use[user] = use.get(user, 0.0) + ran + rate * self._horizon_s
        active = queue.turns.keys() | {held.need.user for held in queue.holding.values()}
        return Shares(use, len(active), self._horizon_s, SMALLEST_SHARE)

    def started(self, user: str, memory: int) -> None:
        """Count a job that starts now with so many bytes against the share of its user."""
        self.shares.add(user, memory / max(1, self._queue.capacity) * self._horizon_s)

    def in_order(self) -> list[Job]:
        """Return all waiting jobs in the order in which they are tried."""
        queue = self._queue
        jobs = [queue.jobs[job_id] for job_id in queue.order]
        if self._is_fair or queue.moved:
            jobs.sort(key=lambda job: -self.score(queue.need(job), job))
        return sorted(jobs, key=lambda job: queue.need(job).rank)

    def age_s(self, job: Job) -> float:
        """Return the age of a waiting job; 0 until it is among the first of its user."""
        since = job.queue.aging_since_at
        return 0.0 if since is None else max(0.0, self._now_s - since.timestamp())

    def factor(self, user: str) -> float:
        """Return what the scores of a user's jobs are divided by; a start raises it."""
        return self.shares.factor(user) if self._is_fair else 1.0

    def score(self, need: Need, job: Job) -> float:
        """Return the score of a waiting job; the highest goes first."""
        return self.merit(need, job) / self.factor(need.user)

    def merit(self, need: Need, job: Job) -> float:
        """Return the score of a waiting job apart from the share of its user."""
        return self._own_merit(need, job) if self._moves is None else self._moves.merit(job)

    def _own_merit(self, need: Need, job: Job) -> float:
        if not self._is_fair:
            return -float(job.id)
        run_time = need.run_time(self._history)
        aged = AGE_OFFSET_S + self.age_s(job)
        return aged * need.patience / (run_time * need.weight)
