"""What a planning pass knows besides the GPUs: the indexed queue, and what ended jobs have taught.

It is kept in memory: read from the database at the first pass, then told of each job that lets go
of its memory. Used by the thread that writes to the database, and by no other. Forecasts
read the history in threads of their own.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpulease.domain.calendar import Occurrence, WindowId, users_without_limits
from gpulease.domain.eligibility import Block, blocks, next_begin
from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import SHOWS_NO_RUN_TIME, Job, Owner
from gpulease.domain.limits import RecentUse
from gpulease.domain.past_jobs import HALF_LIFE, PastUse, RunTimes, keys_of
from gpulease.domain.queue import Queue, share_of
from gpulease.domain.queue_options import QueuePolicy
from gpulease.domain.snapshot import Snapshot, capacity, ledgers
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import PastJob, Policy, Store
from gpulease.service.slurm_gpus import kept_for_slurm

REMEMBERED = timedelta(days=10)
"""Use decays with a half-life of a day: after ten, a thousandth is left."""
_WAITS = 300
"""Recent waits that the usual wait is taken from."""


@dataclass(frozen=True, slots=True)
class _Live:
    """What follows from the live jobs, until one of them changes or a begin time comes."""

    jobs: Sequence[Job] = ()
    """The same object until one changes."""
    holding: Sequence[Job] = ()
    owners: Mapping[int, Owner] = field(default_factory=dict)
    blocked: Mapping[JobId, Block] = field(default_factory=dict)
    """The jobs that may not start, whatever memory is free."""
    until: datetime | None = None
    """The next begin time."""

    @classmethod
    def at(cls, jobs: Sequence[Job], at: datetime) -> "_Live":
        """Go through all live jobs."""
        blocked = blocks(jobs, at)
        return cls(
            jobs,
            tuple(job for job in jobs if job.holds_memory),
            {job.owner.uid: job.owner for job in jobs},
            blocked,
            next_begin(blocked),
        )

    def is_of(self, jobs: Sequence[Job], at: datetime) -> bool:
        """Tell whether this is so of `jobs` at an instant."""
        return self.jobs is jobs and (self.until is None or at < self.until)


FindWindows = Callable[[datetime, Collection[Owner]], Sequence[Occurrence]]
"""Returns the current or next time of each window; the owners are those of the live jobs."""


def no_windows(at: datetime, owners: Collection[Owner]) -> Sequence[Occurrence]:
    """Return none: no GPU is set apart."""
    return ()


class QueueState:
    """The index of live jobs, the history of ended ones, and the recent use by user."""

    def __init__(self, store: Store, windows: FindWindows = no_windows) -> None:
        self.promised: Mapping[JobId, frozenset[GpuUuid]] = {}
        """The jobs that others make way for and their GPUs, as of the latest plan."""
        self._store = store
        self._windows = windows
        self.window_gpus: Mapping[WindowId, tuple[GpuUuid, ...]] = {}
        """The GPUs that the latest plan chose for windows."""
        self._empty: tuple[Observation | None, object, tuple[GpuMemory, ...]] = (None, None, ())
        self._live = _Live()
        """As of the latest look."""
        self._unblocked_at: dict[JobId, datetime] = {}
        """Since when jobs can start that were blocked before."""
        self._queue: Queue | None = None
        self._in_queue: object = None
        """What the latest look found, as far as the index is of it."""
        self._policy: QueuePolicy | None = None
        self._forget()

    def _forget(self) -> None:
        policy = self._policy or QueuePolicy()
        self._run_times = RunTimes(policy.run_time_samples)
        self._use = PastUse(HALF_LIFE.total_seconds())
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self.recent_use: dict[int, RecentUse] = {}
        """By uid: the GiB-hours of leases that have ended."""
        self._owners_of_use: dict[int, Owner] = {}

    def snapshot(
        self,
        jobs: Sequence[Job],
        seen: Observation,
        policy: Policy,
        drained: Mapping[GpuUuid, str],
        at: datetime,
    ) -> Snapshot:
        """Return everything that a decision depends on; `jobs` are all live ones."""
        closed = {**kept_for_slurm(seen.readings, policy.slurm), **drained}
        before = self._live
        live = self._live = before if before.is_of(jobs, at) else _Live.at(jobs, at)
        bare = snapshot(live.holding, seen, policy, closed, at)
        gpus = ledgers(bare)
        queue = self._indexed(live, capacity(gpus), policy.queue, at)
        if live is not before:
            # What jobs that ended were blocked for has been learnt.
            self._note_unblocked(before, live, at)
        owners = live.owners
        windows = tuple(
            replace(each, gpus_before=self.window_gpus.get(each.window.id, ()))
            for each in self._windows(at, owners.values())
        )
        lifted = users_without_limits(windows, at)
        limits = {
            uid: policy.limits(owner) for uid, owner in owners.items() if owner.user not in lifted
        }
        if any(each.groups for each in limits.values()):
            # What other members have used in the past week counts, too.
            past = self._owners_of_use.items()
            limits |= {uid: policy.limits(owner) for uid, owner in past if uid not in owners}
        return replace(
            bare,
            jobs=jobs,
            queue=queue,
            history=self._run_times,
            use=self._use,
            usual_wait_s=_percentile(self._waits, 0.9),
            policy=policy.queue,
            gpus=gpus,
            blocked=live.blocked,
            limits={uid: each for uid, each in limits.items() if each.restrict_starts},
            recent_use=self.recent_use,
            promised=self.promised,
            windows=windows,
        )

    def _note_unblocked(self, before: _Live, now: _Live, at: datetime) -> None:
        if before.blocked:
            self._unblocked_at |= dict.fromkeys(before.blocked.keys() - now.blocked.keys(), at)
        if self._unblocked_at:
            self._unblocked_at = {
                job.id: self._unblocked_at[job.id]
                for job in now.jobs
                if job.id in self._unblocked_at
            }

    def empty(self, seen: Observation, policy: Policy, at: datetime) -> tuple[GpuMemory, ...]:
        """Return the ledgers of the queue's GPUs as if no job ran; at once for the same `seen`."""
        known, basis, found = self._empty
        if known is not seen or basis != (policy.margin, policy.slurm):
            kept = kept_for_slurm(seen.readings, policy.slurm)
            every = ledgers(snapshot((), seen, policy, {}, at))
            found = tuple(gpu for gpu in every if gpu.uuid not in kept)
            self._empty = seen, (policy.margin, policy.slurm), found
        return found

    def predicted(self, job: JobId) -> timedelta | None:
        """Return the predicted run time of a job of the latest snapshot."""
        if self._queue is None or self._policy is None:
            return None
        need = self._queue.need(self._queue.jobs[job])
        return timedelta(seconds=need.run_time(self._run_times))

    def _indexed(self, live: _Live, largest: int, policy: QueuePolicy, at: datetime) -> Queue:
        """Return the index of the jobs that hold memory or may start.

        It is built anew when what everything is relative to has changed.
        """
        if self._queue is None or self._queue.capacity != largest or self._policy != policy:
            self._queue, self._policy, self._in_queue = Queue(largest), policy, None
            self._store.take_released()
            self._forget()
            for past in self._store.past_jobs(at - REMEMBERED):
                self._learn(past, largest)
        for past in self._store.take_released():
            self._learn(past, largest)
        if self._in_queue is not live:
            self._queue.update(job for job in live.jobs if job.id not in live.blocked)
            self._in_queue = live
        return self._queue

    def _learn(self, past: PastJob, largest: int) -> None:
        claim, owner = past.claim, past.owner
        begin, end = past.granted_at.timestamp(), past.released_at.timestamp()
        self._use.add(owner.user, past.memory / max(1, largest), begin, max(begin, end))
        self._owners_of_use[owner.uid] = owner
        self.recent_use.setdefault(owner.uid, RecentUse()).add(
            past.granted_at, past.released_at, past.memory
        )
        # While it was held, or waited for a time or another job, it did not wait for memory.
        since = max(past.eligible_at, self._unblocked_at.get(past.job, past.eligible_at))
        self._waits.append(max(0.0, (past.granted_at - since).total_seconds()))
        if past.started_at is not None and past.outcome not in SHOWS_NO_RUN_TIME:
            keys = keys_of(owner.user, claim, share_of(claim, largest), past.fingerprint)
            ran = (past.released_at - past.started_at).total_seconds()
            used = None if past.utilization is None else past.utilization / 100
            self._run_times.record(keys, max(0.0, ran), used)


def _percentile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
