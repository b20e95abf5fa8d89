"""What the daemon counts in memory for monitoring: jobs, waits, held leases, durations.

One thread changes a value, others read it. No lock: a value is replaced as a whole, so that no
reader sees a counter go back, which monitoring takes for a restart.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from gpulease.domain.eligibility import has_failed
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome
from gpulease.domain.lease import State

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
WAITS: Final = (
    *(1.0, 5.0, 15.0, _MINUTE, 5 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE),
    *(_HOUR, 2 * _HOUR, 4 * _HOUR, 8 * _HOUR, _DAY, 2 * _DAY, 7 * _DAY),
)
"""Upper bounds for the waits of jobs, in seconds."""
DURATIONS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds for what the daemon does, in seconds."""
MOST_USERS = 200
"""Users that are counted by name."""
MOST_EARLIER_USERS = MOST_USERS // 2
"""Of those with a job on record at the start, to leave names for new users."""
OTHER = "other"
"""Stands for the others together."""

Change = tuple[Job | None, Job]
"""A job as it was committed before, and as it is now; None: it was not live."""


class Histogram:
    """Durations in buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The last is for what is above all bounds."""
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Held(NamedTuple):
    """The leases that a user holds, and what was held up to an instant of the steady clock."""

    leases: int
    memory: int
    """Bytes of all of them."""
    gpu_seconds: float
    byte_seconds: float
    since_s: float

    def at(self, now_s: float) -> "Held":
        """Return this at a later instant."""
        passed_s = max(0.0, now_s - self.since_s)
        return self._replace(
            gpu_seconds=self.gpu_seconds + self.leases * passed_s,
            byte_seconds=self.byte_seconds + self.memory * passed_s,
            since_s=now_s,
        )


@dataclass(slots=True)
class UserMetrics:
    """The counts of one user."""

    held: Held
    submitted: int = 0
    requeued: int = 0
    started: int = 0
    failed: int = 0
    out_of_memory: int = 0
    over_lease: int = 0
    """Changed by the event loop; all others by the thread that writes."""
    cpu_seconds: float = 0.0
    """CPU time of jobs that have ended, where it is known."""
    ended: Counter[Outcome] = field(default_factory=Counter)
    states: Counter[State] = field(default_factory=Counter)
    """The live jobs."""
    waits: Histogram = field(default_factory=lambda: Histogram(WAITS))


@dataclass(slots=True)
class Demand:
    """What the queued jobs of a user ask for."""

    oldest_at: datetime
    """When the first of them was submitted."""
    gpus: int = 0
    memory: int = 0
    """Bytes on all these GPUs."""


class JobMetrics:
    """Counts committed changes of jobs: what was rolled back, or is tried again, counts once."""

    def __init__(
        self,
        steady_s: Callable[[], float],
        live: Iterable[Job] = (),
        last: JobId | None = None,
        users: Iterable[str] = (),
    ) -> None:
        """Begin with the live jobs on record, and with zeros for `users` of earlier ones.

        `last` is the highest id on record. A counter that appears with its first event loses it:
        Prometheus sees no increase.
        """
        self.waits = Histogram(WAITS)
        self.steady_s = steady_s
        self._last = last or 0
        self._users: dict[str, UserMetrics] = {}
        for job in live:
            self._move(self.of(job), None, job)
        for user in users:
            self._of(user)

    def of(self, job: Job) -> UserMetrics:
        """Return the counts of the owner of a job."""
        return self._of(job.owner.user)

    def _of(self, user: str) -> UserMetrics:
        found = self._users.get(user)
        if found is None:
            # The first users keep their names, so a job is always counted for the same one.
            name = user if len(self._users) < MOST_USERS else OTHER
            fresh = UserMetrics(Held(0, 0, 0.0, 0.0, self.steady_s()))
            found = self._users.setdefault(name, fresh)
        return found

    def demand(
        self, jobs: Iterable[Job], blocked: Container[JobId], largest: int
    ) -> Mapping[str, "Demand"]:
        """Return what the queued jobs among `jobs` ask for, by the names of their users.

        Jobs that are `blocked` may not start yet, whatever is free. Shares are those of a GPU with
        `largest` bytes.
        """
        found: dict[str, Demand] = {}
        for job in jobs:
            if job.state is State.QUEUED and job.id not in blocked:
                name = job.owner.user if job.owner.user in self._users else OTHER
                asked = found.setdefault(name, Demand(job.submitted_at))
                asked.oldest_at = min(asked.oldest_at, job.submitted_at)
                asked.gpus += job.claim.gpus
                asked.memory += job.claim.gpus * job.claim.memory_on(largest)
        return found

    def went_over(self, job: Job) -> None:
        """Count that a job went over a lease; called by the event loop."""
        self.of(job).over_lease += 1

    def users(self) -> Sequence[tuple[str, UserMetrics]]:
        """Return the counts of each user; the last may be those of all others."""
        return list(self._users.items())

    def committed(self, changes: Iterable[Change]) -> None:
        """Count changes that were committed."""
        for before, after in changes:
            if before is None and after.id <= self._last:
                continue  # it had ended before, or is restored from a damaged database
            user = self.of(after)
            if before is None:
                self._last = after.id
                if after.usage.retry_of is None:
                    user.submitted += 1
                else:
                    user.requeued += 1
            self._count_progress(user, before, after)
            self._move(user, before, after)

    def _count_progress(self, user: UserMetrics, before: Job | None, after: Job) -> None:
        if after.granted_at is not None and (before is None or before.granted_at is None):
            waited_s = max(0.0, (after.granted_at - after.submitted_at).total_seconds())
            self.waits.observe(waited_s)
            user.waits.observe(waited_s)
        if after.started_at is not None and (before is None or before.started_at is None):
            user.started += 1
        if after.state is State.ENDED:
            if after.outcome is not None:
                user.ended[after.outcome] += 1
            user.failed += has_failed(after)
            user.out_of_memory += after.usage.out_of_memory
            cpu_for = after.host_use.cpu_for
            user.cpu_seconds += 0.0 if cpu_for is None else cpu_for.total_seconds()

    def _move(self, user: UserMetrics, before: Job | None, after: Job) -> None:
        """Count a job in its new state, and the change of its leases."""
        if before is not None:
            user.states[before.state] -= 1
        if after.state is not State.ENDED:
            user.states[after.state] += 1
        (had, bytes_before), (has, bytes_after) = _leases(before), _leases(after)
        if (had, bytes_before) != (has, bytes_after):
            held = user.held.at(self.steady_s())
            user.held = held._replace(
                leases=held.leases + has - had, memory=held.memory + bytes_after - bytes_before
            )


def _leases(job: Job | None) -> tuple[int, int]:
    """Return the number of leases that a job holds, and their bytes."""
    if job is None or not job.holds_memory:
        return 0, 0
    return len(job.leases), sum(lease.memory for lease in job.leases)
