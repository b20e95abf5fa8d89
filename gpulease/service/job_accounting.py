"""The accounts of ended jobs: memory used, GPU out of memory or not, and a retry with more.

The output is read before, away from the event loop. The results are stored in the same transaction
as the end of the job: after a crash of the daemon either both are stored, or both happen again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from gpulease.domain.enforcement import with_watch_level
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.health import ends_jobs
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import Claim, Lease
from gpulease.domain.memory_estimate import advised_size_after_oom, retry_size
from gpulease.domain.oom import (
    NO_MEMORY_ERRORS,
    MemoryErrors,
    OutOfMemory,
    diagnose_oom,
    find_memory_errors,
)
from gpulease.errors import CannotLease, TooMany, with_hint
from gpulease.service.jobs import Settle
from gpulease.service.observation import GpuObserver
from gpulease.service.ports import Policy, Store, Transaction, WorkerExited
from gpulease.service.refusals import (
    refuse_beyond_host,
    refuse_one_more,
    refuse_what_is_never_within,
)
from gpulease.service.requeue import after_failure, continuation, queue_again
from gpulease.service.submission import most_of
from gpulease.units import format_size, round_down_size

MOST_RETRIES = 3
_MOST_EVENTS = 1000
_BY_ITSELF = frozenset({Outcome.EXITED, Outcome.SIGNALED})

ReadLogTail = Callable[[JobId], Awaitable[str]]
"""Reads the end of a job's output."""
IdlePoolMemory = Callable[[JobId, GpuUuid], int]
"""Returns the bytes that the pools of a job held on a GPU and never used."""


class JobAccounting:
    """Examines the ends of jobs, and settles their accounts."""

    def __init__(
        self,
        store: Store,
        observer: GpuObserver,
        policy: Callable[[], Policy],
        read_log_tail: ReadLogTail,
        idle_pool_memory: IdlePoolMemory,
        stops: Callable[[Job], bool],
        utilization: Callable[[JobId], int | None],
        hooks_settled: Callable[[Job], Job],
    ) -> None:
        """`stops` returns whether a job is stopped if it stays over its lease.

        `utilization` returns the mean utilization of its GPUs in percent. `hooks_settled` returns
        a job with what its hooks reported.
        """
        self._utilization = utilization
        self._hooks_settled = hooks_settled
        self._store = store
        self._observer = observer
        self._policy = policy
        self._read_log_tail = read_log_tail
        self._idle_pool_memory = idle_pool_memory
        self._stops = stops

    async def settle_exit(self, job_id: JobId, news: WorkerExited) -> Settle:
        """Return the function that settles the account of a job that has ended."""
        job = self._store.job(job_id)
        failed = news.exit is not None and (news.exit.signal is not None or news.exit.code)
        said, broken = NO_MEMORY_ERRORS, None
        if job is not None and job.has_shim and news.outcome in _BY_ITSELF and failed:
            # Read here, and not in the thread that writes: a transaction is open there.
            said = await asyncio.to_thread(find_memory_errors, await self._read_log_tail(job_id))
            broken = await self._broken_gpu(job) if job.queue.requeue else None
        # Reports arrive on the event loop, so they are read here too.
        idle = (
            {lease.gpu: self._idle_pool_memory(job_id, lease.gpu) for lease in job.leases}
            if job
            else {}
        )
        stops = job is not None and self._stops(job) and not self._observer.is_blind

        def settle(tx: Transaction, before: Job, ended: Job) -> Job:
            ended = _as_watched(self._with_use(ended, idle), stops=stops)
            ended = self._hooks_settled(ended)
            ended = replace(ended, utilization=self._utilization(job_id))
            ended = self._settle(tx, before, ended, said, news.ram_limit)
            by_size = ended.usage.out_of_memory or ended.usage.retried_as is not None
            if broken is None or before.outcome is not None or by_size:
                return ended
            return after_failure(tx, ended, f"{(ended.exit or Exit(1)).verb} after {broken}")

        return settle

    async def _broken_gpu(self, job: Job) -> str | None:
        """Return which GPU has failed under a job, as a clause; None for none."""
        seen = await self._observer.observe()
        readings = {reading.uuid: reading for reading in seen.readings}
        since = job.started_at or job.submitted_at
        events = self._store.gpu_events(since, _MOST_EVENTS)
        failed = {event.gpu for event in events if ends_jobs(event.kind)}
        for gpu in (lease.gpu for lease in job.leases):
            reading = readings.get(gpu)
            if reading is None or reading.fault is not None or gpu in failed:
                return f"GPU {gpu if reading is None else reading.label} failed"
        return None

    def _settle(
        self, tx: Transaction, before: Job, job: Job, said: MemoryErrors, ram_limit: int | None
    ) -> Job:
        # A job that is being stopped may end by itself a moment before.
        if job.outcome not in _BY_ITSELF or before.outcome is not None or not job.leases:
            return job
        if ram_limit is not None and job.exit != Exit(0):
            return self._with_more_ram(tx, job, ram_limit)
        peaks = [peak for lease in job.leases if (peak := self._peak(job, lease)) is not None]
        leased = min(lease.most for lease in job.leases)
        found = diagnose_oom(job.exit, said, max(peaks, default=None), leased)
        if found is None:
            return job
        job = replace(job, usage=replace(job.usage, out_of_memory=True))
        if job.claim.memory_bound is not None and peaks:
            # Other jobs may have held what was missing up to its bound.
            leased = max(job.leases[0].memory, min(leased, max(peaks)))
        return self._with_retry(tx, job, found, leased, max(peaks, default=None))

    def _with_use(self, job: Job, idle: Mapping[GpuUuid, int]) -> Job:
        # For a job that was stopped over its lease, all memory counts, used or not.
        idle = {} if job.outcome is Outcome.OVER_LEASE else idle
        leases = tuple(
            # The database gets the peak with the next samples; until then, readers find it here.
            replace(lease, used=max(1, peak - idle.get(lease.gpu, 0)), peak=peak)
            if (peak := self._peak(job, lease)) is not None
            else lease
            for lease in job.leases
        )
        return replace(job, leases=leases)

    def _peak(self, job: Job, lease: Lease) -> int | None:
        return self._observer.peaks.of(job.id, lease)

    def _with_retry(
        self, tx: Transaction, job: Job, found: OutOfMemory, leased: int, peak: int | None
    ) -> Job:
        """Queue a retry with more memory, if the job asked for it; else return it with a hint.

        A job is launched once, so the retry is a new job.
        """
        # A GPU that is unreadable, perhaps because of the job's failure, offers nothing now.
        at = job.ended_at or job.submitted_at
        most = most_of(self._observer.latest, self._policy(), job.claim, at)
        what = f"{(job.exit or Exit(1)).verb}: it ran out of GPU memory{_with_peak(peak, job)}"
        size = advised_size_after_oom(leased, peak, found.lacking)
        size = min(size, most) if most else size
        if most and found.lacking is not None and found.lacking > most:
            lacking = format_size(found.lacking)
            return _with_detail(
                job, what, f"it requested {lacking} at once, and no GPU here has that much"
            )
        if size <= leased:
            return _with_detail(
                job, what, "no GPU here offers more: reduce its use, or use more GPUs"
            )
        wanted = job.usage.retry_factor
        if wanted is None or job.usage.attempt >= MOST_RETRIES:
            return _with_detail(job, what, _larger("--mem", size, has_retried=wanted is not None))
        again = retry_size(leased, wanted)
        again = min(again, most) if most else again
        claim = replace(job.claim, memory=again, memory_bound=None)
        return self._queued_again(tx, job, what, claim, "--mem", again)

    def _with_more_ram(self, tx: Transaction, job: Job, limit: int) -> Job:
        """Queue a retry with more RAM than `limit`, if the job asked for it; else say how."""
        what = job.detail or (job.exit or Exit(1)).verb
        seen = self._observer.latest
        most = self._policy().host.ram_of(seen.host) if seen and seen.host else None
        size = advised_size_after_oom(limit, job.host_use.ram_peak, None)
        size = min(size, round_down_size(most)) if most else size
        if size <= limit:
            return _with_detail(job, what, "this machine has no more RAM to lease: reduce its use")
        wanted = job.usage.retry_factor
        if wanted is None or job.usage.attempt >= MOST_RETRIES:
            return _with_detail(job, what, _larger("--ram", size, has_retried=wanted is not None))
        again = retry_size(limit, wanted)
        again = min(again, round_down_size(most)) if most else again
        claim = replace(job.claim, ram=again)
        return self._queued_again(tx, job, what, claim, "--ram", again)

    def _queued_again(
        self, tx: Transaction, job: Job, what: str, claim: Claim, option: str, size: int
    ) -> Job:
        """Queue a job again with a larger `claim`: that of `option` is now `size` bytes."""
        submission = continuation(tx, job)
        submission = replace(
            submission,
            claim=claim,
            wait_for=None if job.gives_up_at is None else job.gives_up_at - job.submitted_at,
            usage=replace(submission.usage, attempt=job.usage.attempt + 1, size_reason=None),
        )
        try:
            policy, user = self._policy(), job.owner.user
            refuse_one_more(policy, submission, tx.user_count(job.owner.uid))
            limits = policy.limits(job.owner)
            leased = min(lease.most for lease in job.leases)
            refuse_what_is_never_within(claim, limits, leased, user)
            seen = self._observer.latest
            refuse_beyond_host(claim, None if seen is None else seen.host, policy.host)
        except (TooMany, CannotLease) as error:
            hint = f"use {option} {format_size(size)}; it was not retried: {error.message}"
            return _with_detail(job, what, hint)
        job, new = queue_again(tx, job, submission)
        of_ram = " of RAM" if option == "--ram" else ""
        return _with_detail(
            job, f"{what}; job {new.id} retries it with {format_size(size)}{of_ram}", None
        )


def _larger(option: str, size: int, *, has_retried: bool) -> str:
    """Return a hint: how much to ask for, and how to have such a job retried."""
    hint = f"use {option} {format_size(size)}"
    if has_retried:
        return f"it was retried {MOST_RETRIES} times; {hint}"
    return f"{hint}, or have it retried with --retry-oom 1.5x"


def _as_watched(job: Job, *, stops: bool) -> Job:
    """Return `job` with the enforcement levels of its leases at its end; the watch may change."""
    leases = (
        replace(lease, enforced_by=with_watch_level(lease.enforced_by or (), stops=stops))
        for lease in job.leases
    )
    return replace(job, leases=tuple(leases))


def _with_peak(peak: int | None, job: Job) -> str:
    lease = min(job.leases, key=lambda each: each.memory).size
    if peak is None:
        return f" in a lease of {lease}"
    return f" after using up to {format_size(peak)} of a lease of {lease}"


def _with_detail(job: Job, what: str, hint: str | None) -> Job:
    return replace(job, detail=what if hint is None else with_hint(what, hint))
