"""What the hooks in jobs report of their pools, and what is learnt from it about overheads.

A report is its owner's word: bounded when it comes in, kept in memory, and of influence on what the
same user gets (see domain/memory_estimate.py). What a process holds beside its pool is seen when
a look at the GPUs lies between two reports of the same pool.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.memory_estimate import LATEST, OverheadKey, learned_overhead
from gpulease.service.observation import Observation

MOST_PROCESSES = 64
"""Processes of one job that are heard; the ones silent for longest go first."""
_FRESH = timedelta(seconds=30)
"""A figure from a look counts against a report that is no older."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One pool of a framework on one GPU, as the process says that has it; sizes in bytes."""

    gpu: GpuUuid
    pool: int | None
    """What it holds now; None where the framework does not tell."""
    peak: int | None
    """The most of it that was needed."""
    limit: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one process says of one framework."""

    framework: str
    version: str
    pools: tuple[PoolReport, ...]


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """What is known of one framework of a job on one GPU: the most over its processes."""

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
    """The latest report of one pool of one process, and the highest figure seen since."""

    report: PoolReport
    at: datetime
    figure: int | None = None
    idle: int = 0
    """What the pool held and nobody ever needed."""


@dataclass(slots=True)
class _OfJob:
    heard: dict[tuple[int, str, GpuUuid], _Heard] = field(default_factory=dict)
    """By process, framework and GPU; the one heard last is last."""
    seen: dict[tuple[str, GpuUuid], PoolSeen] = field(default_factory=dict)


class Usage:
    """Hears reports, puts them beside the looks, and tells what came of it."""

    def __init__(
        self,
        driver: Callable[[], str | None],
        observed: Mapping[OverheadKey, Mapping[int, Sequence[int]]],
    ) -> None:
        """`observed` is what was seen before this daemon's time, by kind and user."""
        self._driver = driver
        self._jobs: dict[JobId, _OfJob] = {}
        self._unwritten: dict[tuple[JobId, str, GpuUuid], PoolSeen] = {}
        self._observed = {
            kind: {uid: list(each) for uid, each in users.items()}
            for kind, users in observed.items()
        }
        self._models: Mapping[GpuUuid, str] = {}

    def hear(self, job: Job, pid: int, report: Report, at: datetime) -> None:
        """Take in what a process of `job` says; GPUs that it did not lease are passed over."""
        known = self._jobs.setdefault(job.id, _OfJob())
        leased = {lease.gpu for lease in job.leases}
        for pool in report.pools:
            if pool.gpu in leased:
                self._hear(job, known, pid, report, pool, at)
        while len({process for process, _, _ in known.heard}) > MOST_PROCESSES:
            del known.heard[next(iter(known.heard))]

    def _hear(
        self, job: Job, known: _OfJob, pid: int, report: Report, pool: PoolReport, at: datetime
    ) -> None:
        key = pid, report.framework, pool.gpu
        last = known.heard.pop(key, None)
        idle = max(0, pool.pool - pool.peak) if pool.pool is not None and pool.peak else 0
        known.heard[key] = _Heard(pool, at, idle=idle)
        # Whoever has subordinate uids would be as many users as others listen to, alone.
        known_user = job.owner.has_name
        beside = _difference(last, pool) if last is not None and known_user else None
        place = report.framework, pool.gpu
        kind = OverheadKey(
            report.framework,
            self._models.get(pool.gpu, ""),
            self._driver() or "",
            len(job.leases),
        )
        new = PoolSeen(
            job.id, job.owner.uid, pool.gpu, kind, report.version, pool.limit, pool.peak, beside, at
        )
        old = known.seen.get(place)
        merged = new if old is None else _merged(old, new)
        if merged != old:
            known.seen[place] = self._unwritten[job.id, *place] = merged

    async def observe(self, seen: Observation) -> None:
        """Put the figures of a look beside the reports that it came after."""
        self._models = {reading.uuid: reading.name for reading in seen.readings}
        for reading in seen.readings:
            for process in reading.processes or ():
                job = seen.jobs_by_pid.get(process.pid)
                known = self._jobs.get(job) if job is not None else None
                if known is None or process.memory is None:
                    continue
                mine = [
                    heard
                    for (pid, _, gpu), heard in known.heard.items()
                    if (pid, gpu) == (process.pid, reading.uuid)
                ]
                # Two frameworks in one process: whose the rest is, nobody can tell.
                if len(mine) == 1 and mine[0].at <= seen.at <= mine[0].at + _FRESH:
                    mine[0].figure = max(process.memory, mine[0].figure or 0)

    def idle(self, job: JobId, gpu: GpuUuid) -> int:
        """Return how many bytes the pools of a job held on a GPU and never needed."""
        known = self._jobs.get(job, _OfJob())
        return sum(heard.idle for (_, _, of), heard in known.heard.items() if of == gpu)

    def of(self, job: JobId) -> Sequence[PoolSeen]:
        """Return what is known of the pools of a job that has not ended."""
        return tuple(self._jobs[job].seen.values()) if job in self._jobs else ()

    def unwritten(self) -> Sequence[PoolSeen]:
        """Return what has changed since `written`."""
        return tuple(self._unwritten.values())

    def written(self, rows: Sequence[PoolSeen], living: set[JobId]) -> None:
        """Note that these are on disk; jobs that are not among the living are learnt from."""
        for row in rows:
            key = row.job, row.kind.framework, row.gpu
            if self._unwritten.get(key) is row:
                del self._unwritten[key]
        for job in [job for job in self._jobs if job not in living]:
            for each in self._jobs.pop(job).seen.values():
                if each.overhead is not None:
                    of_user = self._observed.setdefault(each.kind, {}).setdefault(each.uid, [])
                    of_user.insert(0, each.overhead)
                    del of_user[LATEST:]

    def beside(self, uid: int, kind: OverheadKey, start: int) -> int:
        """Return the bytes to keep free beside a pool of this kind, for a job of `uid`."""
        return learned_overhead(start, uid, self._observed.get(kind, {}))


def _difference(last: _Heard, pool: PoolReport) -> int | None:
    """Return what the process held beside its pool, if the pool stood still around the look."""
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
