"""Reports of memory pools by the hooks in jobs, and the overheads that they show.

A user controls the reports of the user's jobs, so their number is limited, and they affect only
jobs of the same user, within bounds (see domain/memory_estimate.py and domain/overuse.py). The
memory that a process uses in addition to its pool is known when an observation lies between two
equal reports. If the process exceeds the lease, a lower bound is known.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpulease.domain.enforcement import Reports, pool_limits
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Lease
from gpulease.domain.memory_estimate import LATEST, OverheadKey, learned_overhead
from gpulease.domain.overuse import excess_overhead
from gpulease.service.observation import Observation

MOST_PROCESSES = 64
"""Processes of one job with reports; those silent for longest are dropped first."""
_FRESH = timedelta(seconds=30)
"""The longest time from a report to an observation that it is compared with."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One pool of a framework on one GPU, as its process reports it; sizes in bytes."""

    gpu: GpuUuid
    pool: int | None
    """Its present size; None if the framework does not report it."""
    peak: int | None
    """The most of it that was in use."""
    limit: int | None


@dataclass(frozen=True, slots=True)
class FrameworkReport:
    """The report of one process about one framework."""

    framework: str
    version: str
    pools: tuple[PoolReport, ...]


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """The figures of one framework of a job on one GPU: the highest of its processes."""

    job: JobId
    uid: int
    gpu: GpuUuid
    kind: OverheadKey
    version: str
    limit: int | None
    peak: int | None
    overhead: int | None
    at: datetime


@dataclass(slots=True)
class _Heard:
    """The latest report of one pool of one process, and the highest observed use since."""

    report: PoolReport
    at: datetime
    figure: int | None = None
    idle: int = 0
    """Bytes that the pool held and that were never in use."""


@dataclass(slots=True)
class _OfJob:
    heard: dict[tuple[int, str, GpuUuid], _Heard] = field(default_factory=dict)
    """By process, framework and GPU; the latest report is last."""
    seen: dict[tuple[str, GpuUuid], PoolSeen] = field(default_factory=dict)


class Usage:
    """Combines reports with observations, and returns the overheads and pools of jobs."""

    def __init__(
        self,
        driver: Callable[[], str | None],
        observed: Mapping[OverheadKey, Mapping[int, Sequence[int]]],
    ) -> None:
        """`observed` are the overheads from before the start of this daemon, by kind and user."""
        self._driver = driver
        self._jobs: dict[JobId, _OfJob] = {}
        self._unwritten: dict[tuple[JobId, str, GpuUuid], PoolSeen] = {}
        self._observed = {
            kind: {uid: list(each) for uid, each in users.items()}
            for kind, users in observed.items()
        }
        self._models: Mapping[GpuUuid, str] = {}

    def hear(self, job: Job, pid: int, report: FrameworkReport, at: datetime) -> None:
        """Add the report of a process of `job`; ignore GPUs that the job did not lease."""
        known = self._jobs.setdefault(job.id, _OfJob())
        leased = {lease.gpu for lease in job.leases}
        for pool in report.pools:
            if pool.gpu in leased:
                self._hear(job, known, pid, report, pool, at)
        while len({process for process, _, _ in known.heard}) > MOST_PROCESSES:
            del known.heard[next(iter(known.heard))]

    def _hear(
        self,
        job: Job,
        known: _OfJob,
        pid: int,
        report: FrameworkReport,
        pool: PoolReport,
        at: datetime,
    ) -> None:
        key = pid, report.framework, pool.gpu
        last = known.heard.pop(key, None)
        idle = max(0, pool.pool - pool.peak) if pool.pool is not None and pool.peak else 0
        known.heard[key] = _Heard(pool, at, idle=idle)
        # A user with subordinate uids could otherwise act as many users.
        known_user = job.owner.has_name
        beside = _difference(last, pool) if last is not None and known_user else None
        self._note(job, report.framework, report.version, pool, beside, at)

    def _note(
        self,
        job: Job,
        framework: str,
        version: str,
        pool: PoolReport,
        beside: int | None,
        at: datetime,
    ) -> None:
        known, place = self._jobs.setdefault(job.id, _OfJob()), (framework, pool.gpu)
        kind = OverheadKey(
            framework, self._models.get(pool.gpu, ""), self._driver() or "", len(job.leases)
        )
        new = PoolSeen(
            job.id, job.owner.uid, pool.gpu, kind, version, pool.limit, pool.peak, beside, at
        )
        old = known.seen.get(place)
        merged = new if old is None else _merged(old, new)
        if merged != old:
            known.seen[place] = self._unwritten[job.id, *place] = merged

    async def observe(self, seen: Observation) -> None:
        """Compare an observation with the reports before it."""
        self._models = {reading.uuid: reading.name for reading in seen.readings}
        for (job, gpu), processes in seen.processes.items():
            known = self._jobs.get(job)
            for process in processes:
                if known is None or process.memory is None:
                    continue
                mine = [
                    heard
                    for (pid, _, of), heard in known.heard.items()
                    if (pid, of) == (process.pid, gpu)
                ]
                # With two frameworks in one process, the overhead of each is unknown.
                if len(mine) == 1 and mine[0].at <= seen.at <= mine[0].at + _FRESH:
                    mine[0].figure = max(process.memory, mine[0].figure or 0)

    def idle(self, job: JobId, gpu: GpuUuid) -> int:
        """Return the bytes that the pools of a job held on a GPU and never used."""
        known = self._jobs.get(job, _OfJob())
        return sum(heard.idle for (_, _, of), heard in known.heard.items() if of == gpu)

    def in_use(self, job: JobId, gpu: GpuUuid, pids: Collection[int]) -> int | None:
        """Return the most that the pools of these processes of a job had in use on a GPU."""
        known = self._jobs.get(job, _OfJob())
        pools = [
            heard.report.peak if heard.report.peak is not None else heard.report.pool
            for (pid, _, of), heard in known.heard.items()
            if of == gpu and pid in pids
        ]
        return sum(filter(None, pools)) if any(each is not None for each in pools) else None

    def excess_overhead(self, job: Job, lease: Lease, reports: Reports, seen: Observation) -> int:
        """Return the bytes over a lease that frameworks hold beside their pools, and learn them.

        `reports` are those of the hooks of the job. A process without a limit on that GPU does not
        count, and what a pool holds beyond its limit is no overhead.
        """
        limits, processes = pool_limits(reports, lease.gpu), []
        for process in seen.processes.get((job.id, lease.gpu), ()):
            if process.memory is None or process.pid not in limits:
                continue
            pools = [
                self._pool(job.id, process.pid, framework, lease.gpu, limit)
                for framework, limit in limits[process.pid].items()
            ]
            total = sum(pool.limit or 0 for pool in pools)
            held = (max(pool.pool or 0, pool.peak or 0) for pool in pools)
            beyond = sum(
                max(0, size - (pool.limit or 0)) for size, pool in zip(held, pools, strict=True)
            )
            processes.append((process.memory - beyond, total))
            # The pool may be smaller than its limit, but is unknown where it grows.
            beside = process.memory - beyond - total
            if len(pools) == 1 and process.memory > lease.most and job.owner.has_name:
                (framework,) = limits[process.pid]
                version = next(each.version for each in reports if each.framework == framework)
                self._note(job, framework, version, pools[0], beside, seen.at)
        return excess_overhead(lease.most, processes)

    def _pool(self, job: JobId, pid: int, framework: str, gpu: GpuUuid, limit: int) -> PoolReport:
        """Return the latest report of a pool, or its first limit where there is none."""
        known = self._jobs.get(job, _OfJob()).heard.get((pid, framework, gpu))
        if known is None or known.report.limit is None:
            return PoolReport(gpu, None, None, limit)
        return known.report

    def of(self, job: JobId) -> Sequence[PoolSeen]:
        """Return the pools of a job that has not ended."""
        return tuple(self._jobs[job].seen.values()) if job in self._jobs else ()

    def unwritten(self) -> Sequence[PoolSeen]:
        """Return what has changed since the last `written`."""
        return tuple(self._unwritten.values())

    def written(self, rows: Sequence[PoolSeen], holding: set[JobId]) -> None:
        """Note that `rows` are on disk, and learn from those that hold no memory now."""
        for row in rows:
            key = row.job, row.kind.framework, row.gpu
            if self._unwritten.get(key) is row:
                del self._unwritten[key]
        for job in [job for job in self._jobs if job not in holding]:
            for each in self._jobs.pop(job).seen.values():
                if each.overhead is not None:
                    of_user = self._observed.setdefault(each.kind, {}).setdefault(each.uid, [])
                    of_user.insert(0, each.overhead)
                    del of_user[LATEST:]

    def beside(self, uid: int, kind: OverheadKey, start: int) -> int:
        """Return the bytes to reserve in addition to a pool of this kind, for a job of `uid`."""
        learned = learned_overhead(start, uid, self._observed.get(kind, {}))
        current = (
            each.overhead or 0
            for known in self._jobs.values()
            for each in known.seen.values()
            if (each.uid, each.kind) == (uid, kind)
        )
        # A job that still runs shows at least how much is needed.
        most = max(current, default=0)
        return (
            learned_overhead(start, uid, {uid: [most]}) if most > max(learned, start) else learned
        )


def _difference(last: _Heard, pool: PoolReport) -> int | None:
    """Return the bytes beside the pool, if the pool did not change around the observation."""
    if last.figure is None or pool.pool is None or last.report.pool != pool.pool:
        return None
    return max(0, last.figure - pool.pool)


def _merged(old: PoolSeen, new: PoolSeen) -> PoolSeen:
    return replace(
        new,
        at=old.at,
        peak=_larger(old.peak, new.peak),
        overhead=_larger(old.overhead, new.overhead),
    )


def _larger(one: int | None, other: int | None) -> int | None:
    known = [each for each in (one, other) if each is not None]
    return max(known, default=None)
