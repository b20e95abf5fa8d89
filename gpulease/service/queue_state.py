"""What a planning pass knows besides the GPUs: the indexed queue, and what ended jobs have taught.

It is kept in memory: read from the database at the first pass, then told of each job that lets go
of its memory. Used by the thread that writes to the database, and by no other. Forecasts
read the history in threads of their own.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from gpulease.domain.calendar import Occurrence, WindowId, users_without_limits
from gpulease.domain.eligibility import blocks
from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job, Outcome, Owner
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
_TEACHES_NOTHING = frozenset(
    {
        Outcome.GAVE_UP,
        Outcome.LAUNCH_FAILED,
        Outcome.LOST,
        Outcome.PREEMPTED,
        Outcome.REQUEUED,
        Outcome.DEPENDENCY_FAILED,
    }
)
"""Ends that the machine caused, or that came before the start. After all others (also a time
limit, or a cancel) the next run of the same command may well hold its memory for as long."""


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
        self._blocked: frozenset[JobId] = frozenset()
        """The jobs that could not start at the latest look, whatever memory was free."""
        self._unblocked_at: dict[JobId, datetime] = {}
        """Since when others could."""
        self._queue: Queue | None = None
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
        bare = snapshot(jobs, seen, policy, closed, at)
        gpus = ledgers(bare)
        blocked = blocks(jobs, at)
        eligible = (job for job in jobs if job.id not in blocked)
        queue = self._indexed(eligible, capacity(gpus), policy.queue, at)
        if self._blocked:
            self._unblocked_at |= dict.fromkeys(self._blocked - blocked.keys(), at)
        if self._unblocked_at:
            self._unblocked_at = {
                job.id: self._unblocked_at[job.id] for job in jobs if job.id in self._unblocked_at
            }
        self._blocked = frozenset(blocked)
        owners = {job.owner.uid: job.owner for job in jobs}
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
            queue=queue,
            history=self._run_times,
            use=self._use,
            usual_wait_s=_percentile(self._waits, 0.9),
            policy=policy.queue,
            gpus=gpus,
            blocked=blocked,
            limits={uid: each for uid, each in limits.items() if each.restrict_starts},
            recent_use=self.recent_use,
            promised=self.promised,
            windows=windows,
        )

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

    def _indexed(
        self, jobs: Iterable[Job], largest: int, policy: QueuePolicy, at: datetime
    ) -> Queue:
        """Return the index of `jobs`, built anew when what everything is relative to changed."""
        if self._queue is None or self._queue.capacity != largest or self._policy != policy:
            self._queue, self._policy = Queue(largest), policy
            self._store.take_released()
            self._forget()
            for past in self._store.past_jobs(at - REMEMBERED):
                self._learn(past, largest)
        for past in self._store.take_released():
            self._learn(past, largest)
        self._queue.update(jobs)
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
        if past.started_at is not None and past.outcome not in _TEACHES_NOTHING:
            keys = keys_of(owner.user, claim, share_of(claim, largest), past.fingerprint)
            ran = (past.released_at - past.started_at).total_seconds()
            used = None if past.utilization is None else past.utilization / 100
            self._run_times.record(keys, max(0.0, ran), used)


def _percentile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
