"""Hears what the framework hooks of jobs limit and could not limit, and keeps it on disk.

A report is on disk before it is acknowledged: the hook repeats what was not.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpulease.domain.enforcement import (
    HookReport,
    HookState,
    Reports,
    UncoveredProcess,
    as_reported,
    with_report,
)
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.errors import RecordUnwritable
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, Event, InThread, Store
from gpulease.service.transactions import change_jobs

_SILENT_FOR = timedelta(seconds=30)
"""How long a process may be on a GPU before its hook reports, as after a restart of the daemon."""
_SILENT = "no hook in it has reported a limit"
_MOST_PROCESSES = 64
"""Processes of one job with counted steps."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Steps:
    """The training steps of one process, and the seconds that they took."""

    count: int
    seconds: float

    @property
    def rate(self) -> float | None:
        """Steps per second."""
        return self.count / self.seconds if self.seconds > 0 else None


class HookReports:
    """The reports of jobs that hold memory. For the event loop."""

    def __init__(self, store: Store, clock: Clock, in_writer: InThread, *, by_driver: bool) -> None:
        """`by_driver` tells whether a process that is listed on a GPU uses it."""
        self._by_driver = by_driver
        self._store = store
        self._clock = clock
        self._in_writer = in_writer
        self._reports: dict[JobId, Reports] = {
            job.id: store.hook_reports(job.id) for job in store.holding()
        }
        self._unwritten: set[JobId] = set()
        self._silent_since: dict[tuple[JobId, int], datetime] = {}
        self._steps: dict[JobId, dict[int, Steps]] = {}

    def of(self, job: JobId) -> Reports:
        """Return the reports of a job that has not ended."""
        return self._reports.get(job, ())

    def steps(self, job: JobId) -> Steps | None:
        """Return the steps of the process of a job that has made most of them."""
        counted = self._steps.get(job, {}).values()
        return max(counted, key=lambda each: each.count, default=None)

    def note_steps(self, job: Job, pid: int, steps: Steps) -> None:
        """Keep what a process has counted so far."""
        counted = self._steps.setdefault(job.id, {})
        if pid in counted or len(counted) < _MOST_PROCESSES:
            counted[pid] = steps

    async def hear(self, job: Job, report: HookReport) -> None:
        """Add a report of a process of `job`, which holds memory.

        Raises:
            RecordUnwritable: it is not on disk.
        """
        known = self.of(job.id)
        found = with_report(known, report, [lease.gpu for lease in job.leases])
        if found is known and job.id not in self._unwritten:
            return
        self._reports[job.id] = found
        self._unwritten.add(job.id)
        failed = report.state is HookState.FAILED and found is not known
        is_first = failed and all(each.state is not HookState.FAILED for each in known)
        event = Event(report.at, "hook_failed", report.why) if is_first else None
        used_at = report.at if report.state is HookState.LIMITED and report.limits else None
        await self._in_writer(lambda: self._write(job.id, event, used_at))

    def _write(self, job_id: JobId, event: Event | None, used_at: datetime | None) -> None:
        # In the writing thread; what was heard meanwhile is written with it.
        self._unwritten.discard(job_id)
        try:
            with change_jobs(self._store) as tx:
                job = tx.job(job_id)
                if job is None or not job.holds_memory:
                    return
                tx.save_hooks(job_id, self.of(job_id))
                if used_at is not None and job.activity.first_use_at is None:
                    tx.save(_used_since(job, used_at), event)
                elif event is not None:
                    tx.note(job_id, event)
        except RecordUnwritable:
            self._unwritten.add(job_id)
            raise

    async def hear_absent(self, job: Job, process: UncoveredProcess) -> None:
        """Note that a process uses a GPU without the hook."""
        at = self._clock.now()
        absent = HookReport(process.pid, "", "", HookState.ABSENT, at, why=process.why)
        try:
            await self.hear(job, absent)
        except RecordUnwritable as error:
            _log.debug("%s; the process without the hook stays in memory", error.message)

    async def observe(self, seen: Observation) -> None:
        """Note the first use of a GPU that is seen, and forget jobs that have ended."""
        holding = {job.id: job for job in self._store.holding()}
        for known in (self._reports, self._steps):
            for gone in known.keys() - holding.keys():
                del known[gone]
        self._unwritten &= holding.keys()
        if self._by_driver:
            await self._note_silent(seen, holding)
        for number in set(seen.jobs_by_pid.values()) & holding.keys():
            job = holding[number]
            if job.activity.first_use_at is None and job.holder is None:
                await self._note_use(number, seen.at)

    async def _note_silent(self, seen: Observation, holding: Mapping[JobId, Job]) -> None:
        """Note the processes that have been on a GPU for a while without any report."""
        silent = {
            (number, pid)
            for number, reports in self._reports.items()
            for lease in holding[number].leases
            for pid in seen.users(number, lease.gpu)
            if pid not in {each.pid for each in reports}
        }
        self._silent_since = {key: self._silent_since.get(key, seen.at) for key in silent}
        for (number, pid), since in self._silent_since.items():
            if seen.at - since >= _SILENT_FOR:
                await self.hear_absent(holding[number], UncoveredProcess(pid, "", _SILENT))

    async def _note_use(self, number: JobId, at: datetime) -> None:
        try:
            await self._in_writer(lambda: self._write(number, None, at))
        except RecordUnwritable as error:
            _log.debug("%s; the first use of a GPU is not on record yet", error.message)

    def settled(self, job: Job) -> Job:
        """Return a job that ends, with what its hooks limited until then and what it did."""
        reports, steps = self.of(job.id), self.steps(job.id)
        leases = tuple(
            replace(lease, enforced_by=as_reported(lease.enforced_by or (), reports, lease.gpu))
            for lease in job.leases
        )
        if steps is not None:
            activity = replace(job.activity, steps=steps.count, steps_per_second=steps.rate)
            job = replace(job, activity=activity)
        return replace(job, leases=leases)


def _used_since(job: Job, at: datetime) -> Job:
    # Never before its start, whatever the clock has done meanwhile.
    used_at = at if job.started_at is None else max(at, job.started_at)
    return replace(job, activity=replace(job.activity, first_use_at=used_at))
