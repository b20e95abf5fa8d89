"""What the store keeps in memory: live jobs, counts by user, drains, the pause and the windows.

The thread that writes changes one copy and keeps the former values, so that a transaction can be
rolled back. Readers have another copy, which follows at each commit. So a write costs the same
however many jobs wait. The database has all of it.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from gpulease.domain.calendar import Window
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.health import GpuAvailability
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.queue_options import QueuePause
from gpulease.service.metrics import JobMetrics
from gpulease.service.ports import PastJob, UserCount
from gpulease.store.rows import invocation_key

_RECENT = 64
"""Jobs that have ended, and invocations, that are kept in memory: they are soon asked for."""
_ABSENT: Final = object()

T = TypeVar("T")

Jobs = dict[JobId, Job]


class UndoLog:
    """The former values of dictionary items."""

    def __init__(self) -> None:
        self._former: list[tuple[dict[Any, Any], Any, Any]] = []

    def __len__(self) -> int:
        return len(self._former)

    def put(self, of: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an item."""
        self._former.append((of, key, of.get(key, _ABSENT)))
        of[key] = value

    def drop(self, of: dict[Any, Any], key: Any) -> None:
        """Remove an item, if it is there."""
        if key in of:
            self._former.append((of, key, of.pop(key)))

    def roll_back(self, length: int) -> None:
        """Restore what has changed since the log had this length."""
        while len(self._former) > length:
            of, key, value = self._former.pop()
            if value is _ABSENT:
                del of[key]
            else:
                of[key] = value

    def clear(self) -> None:
        """Forget the former values."""
        self._former.clear()


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known about the GPUs and the queue besides jobs."""

    gpus: frozenset[GpuUuid] = frozenset()
    """The GPUs that a lease can refer to."""
    availabilities: Mapping[GpuUuid, GpuAvailability] = field(default_factory=dict)
    pause: QueuePause | None = None
    windows: tuple[Window, ...] = ()

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return why each drained GPU takes no new leases."""
        found = ((gpu, each.reason) for gpu, each in self.availabilities.items())
        return {gpu: reason for gpu, reason in found if reason is not None}


class UserCounts:
    """Counts the live jobs of each user, and the bytes of their invocations.

    The elements of an array share an invocation, which counts as long as one of them waits.
    """

    def __init__(self, live: Iterable[Job], sizes: Mapping[JobId, int], undo: UndoLog) -> None:
        self._undo = undo
        self._of: dict[int, UserCount] = {}
        self._sizes = dict(sizes)
        self._users: dict[JobId, int] = {}
        """Of each invocation, the live jobs."""
        self._waiting: dict[JobId, int] = {}
        """Of each invocation, the queued jobs."""
        for job in live:
            self._count(job, 1)

    def of(self, uid: int) -> UserCount:
        """Return the counts of a user."""
        return self._of.get(uid, UserCount())

    def users_of(self, invocation: JobId) -> int:
        """Return how many live jobs have this invocation."""
        return self._users.get(invocation, 0)

    def note(self, before: Job | None, after: Job, size: int | None = None) -> None:
        """Count a changed job; `size` is given with a new invocation."""
        key = invocation_key(after)
        if size is not None:
            self._undo.put(self._sizes, key, size)
        # First the new state: an invocation that is still in use does not leave meanwhile.
        if after.state is not State.ENDED:
            self._count(after, 1)
        if before is not None:
            self._count(before, -1)
        if not self._users.get(key):
            for counted in (self._sizes, self._users, self._waiting):
                self._undo.drop(counted, key)

    def _count(self, job: Job, one: int) -> None:
        key, was, put = invocation_key(job), self.of(job.owner.uid), self._undo.put
        put(self._users, key, self._users.get(key, 0) + one)
        waits = one if job.state is State.QUEUED else 0
        before = self._waiting.get(key, 0)
        if waits:
            put(self._waiting, key, before + waits)
        turned = (before + waits > 0) - (before > 0)
        now = UserCount(
            was.waiting + waits,
            was.waiting_bytes + turned * self._sizes.get(key, 0),
            was.holds + (one if job.holder is not None else 0),
        )
        if now == UserCount():
            self._undo.drop(self._of, job.owner.uid)
        else:
            put(self._of, job.owner.uid, now)


Mark = tuple[int, int, Machine]


class LiveState:
    """The two copies: that of the writing thread, and what is committed."""

    def __init__(
        self,
        jobs: Sequence[Job],
        sizes: Mapping[JobId, int],
        machine: Machine,
        metrics: JobMetrics,
    ) -> None:
        self._metrics = metrics
        self._undo = UndoLog()
        self._jobs: Jobs = {job.id: job for job in jobs}
        self.counts = UserCounts(self._jobs.values(), sizes, self._undo)
        self._undo.clear()
        self._dependents = {job.id: None for job in jobs if _is_dependent(job)}
        self.machine = machine
        """As the writing thread has changed it."""
        self.committed_machine = machine
        self._changed: Jobs = {}
        """Each job that has changed since the last commit."""
        self._invocations: dict[JobId, Invocation] = {}
        """Those that were added since the last commit."""
        self._released: list[PastJob] = []
        self._is_mixed_up = False
        """Whether a job was added that is older than others."""
        self._committed_jobs = dict(self._jobs)
        self._holding = {job.id: job for job in self._jobs.values() if job.holds_memory}
        """The committed jobs that hold memory."""
        self._recent_jobs: Jobs = {}
        self._recent_invocations: dict[JobId, Invocation] = {}
        self._committed_released: list[PastJob] = []
        self._in_order: tuple[Job, ...] | None = None
        self._publishing = threading.Lock()

    # For the writing thread: what it has changed is included.

    def jobs(self) -> tuple[Job, ...]:
        """Return every live job, by id."""
        return tuple(self._jobs.values()) if self._changed else self.committed_jobs()

    def dependents(self) -> Sequence[Job]:
        """Return the queued jobs that wait for others, by id."""
        return [self._jobs[number] for number in sorted(self._dependents)]

    def live_job(self, job: JobId) -> Job | None:
        """Return a live job; None if it has ended, or never was."""
        return self._jobs.get(job)

    def job(self, job: JobId) -> Job | None:
        """Return a job that is live or has ended recently."""
        return self._jobs.get(job) or self._changed.get(job) or self._recent_jobs.get(job)

    def invocation(self, key: JobId) -> Invocation | None:
        """Return an invocation that was added recently."""
        return self._invocations.get(key) or self._recent_invocations.get(key)

    def note(self, before: Job | None, after: Job, size: int | None = None) -> None:
        """Keep a changed job; `size` is that of a new invocation in bytes."""
        self.counts.note(before, after, size)
        self.keep(after)

    def keep(self, job: Job) -> None:
        """Keep a job of which nothing has changed that is counted."""
        self._undo.put(self._changed, job.id, job)
        if _is_dependent(job):
            self._undo.put(self._dependents, job.id, None)
        else:
            self._undo.drop(self._dependents, job.id)
        if job.state is State.ENDED:
            self._undo.drop(self._jobs, job.id)
            return
        is_older = job.id not in self._jobs and job.id < next(reversed(self._jobs), 0)
        self._undo.put(self._jobs, job.id, job)
        if is_older:
            self._is_mixed_up = True
            _sort(self._jobs)

    def keep_invocation(self, key: JobId, invocation: Invocation) -> None:
        """Keep a new invocation."""
        self._undo.put(self._invocations, key, invocation)

    def keep_released(self, past: PastJob) -> None:
        """Keep what was learnt from a job that released its memory."""
        self._released.append(past)

    def mark(self) -> Mark:
        """Return the present state, for `roll_back`."""
        return len(self._undo), len(self._released), self.machine

    def roll_back(self, to: Mark | None = None) -> None:
        """Restore a marked state; None: that of the last commit."""
        undone, released, self.machine = (0, 0, self.committed_machine) if to is None else to
        some_ended = any(job.state is State.ENDED for job in self._changed.values())
        self._undo.roll_back(undone)
        del self._released[released:]
        if some_ended:
            _sort(self._jobs)

    def publish(self) -> None:
        """Show readers what has changed: it is committed."""
        self._undo.clear()
        with self._publishing:
            self.committed_machine = self.machine
            if self._changed:
                self._publish_jobs()
        for key, invocation in self._invocations.items():
            _keep_recent(self._recent_invocations, key, invocation)
        self._invocations.clear()
        self._committed_released += self._released
        self._released.clear()

    def _publish_jobs(self) -> None:
        self._metrics.committed(
            (self._committed_jobs.get(number), job) for number, job in self._changed.items()
        )
        for job in self._changed.values():
            if job.state is State.ENDED:
                # In this order: a reader finds it in one of the two.
                _keep_recent(self._recent_jobs, job.id, job)
                self._committed_jobs.pop(job.id, None)
                self._holding.pop(job.id, None)
                if not self.counts.users_of(key := invocation_key(job)):
                    self._recent_invocations.pop(key, None)
            else:
                self._committed_jobs[job.id] = job
                if job.holds_memory:
                    self._holding[job.id] = job
                else:
                    self._holding.pop(job.id, None)
        self._changed.clear()
        self._in_order = None
        if self._is_mixed_up:
            self._is_mixed_up = False
            self._committed_jobs = dict(sorted(self._committed_jobs.items()))

    def take_released(self) -> Sequence[PastJob]:
        """Return what was learnt from jobs that released their memory since the last call."""
        released, self._committed_released = self._committed_released, []
        return released

    def forget(self, jobs: Iterable[JobId]) -> None:
        """Forget ended jobs that are deleted."""
        for job in jobs:
            self._recent_jobs.pop(job, None)

    # For any thread, as last committed.

    def committed_jobs(self) -> tuple[Job, ...]:
        """Return every live job, by id; the same object until one changes."""
        found = self._in_order
        if found is None:
            with self._publishing:
                found = self._in_order = tuple(self._committed_jobs.values())
        return found

    def committed_holding(self) -> list[Job]:
        """Return the jobs that hold memory, by id."""
        with self._publishing:
            found = list(self._holding.values())
        return sorted(found, key=lambda job: job.id)

    def committed_live(self, job: JobId) -> Job | None:
        """Return a live job."""
        return self._committed_jobs.get(job)

    def committed_job(self, job: JobId) -> Job | None:
        """Return a job that is live or has ended recently."""
        return self._committed_jobs.get(job) or self._recent_jobs.get(job)

    def committed_invocation(self, key: JobId) -> Invocation | None:
        """Return an invocation that was added recently."""
        return self._recent_invocations.get(key)


def _is_dependent(job: Job) -> bool:
    return bool(job.queue.after) and job.state is State.QUEUED


def _sort(jobs: Jobs) -> None:
    """Put jobs into the order of their ids, in place, since the undo log refers to the object."""
    for number in sorted(jobs):
        jobs[number] = jobs.pop(number)


def _keep_recent(kept: dict[JobId, T], key: JobId, value: T) -> None:
    kept[key] = value
    if len(kept) > _RECENT:
        del kept[next(iter(kept))]
