"""The launcher port for leases of Slurm's jobs: Slurm starts their processes and ends them.

A lease ends when the epilog says so, or when Slurm and the process table say that the job is gone
(`reconciliation`). Processes that Slurm leaves behind are killed first: they may hold memory.

The enforcement levels of a job are what Slurm enforces itself, and the driver's limits. These are
set on Slurm's cgroup of the job (version 2), which exists once its first step has started. Slurm's
device rules hold where cgroup.conf says so.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from gpulease.domain.enforcement import EnforcementLevel, in_level_order
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Exit, Invocation, Job, Outcome, one_line
from gpulease.errors import SlurmFailed, split_hint
from gpulease.host.processes import ProcessTable
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import (
    Clock,
    MemoryLimiter,
    NotLimited,
    WorkerExited,
    WorkerNews,
    WorkerStarted,
)
from gpulease.shim.process_tree import Entry, processes
from gpulease.slurm.annotations import Note, with_note
from gpulease.slurm.node.controller import RunSlurm, label_of, list_job, run_slurm
from gpulease.slurm.node.processes import SlurmProcesses, directory_of

_log = logging.getLogger(__name__)

_CONSTRAINED = re.compile(r"^ConstrainDevices\s*=\s*yes\s*$", re.MULTILINE | re.IGNORECASE)
_TASK_CGROUP = re.compile(r"^TaskPlugin\s*=.*\btask/cgroup\b", re.MULTILINE)

NoteLimits = Callable[[JobId, Mapping[GpuUuid, int | None], str], Awaitable[object]]
"""Stores the driver's limits of a job, and a sentence about them."""

LOST = "Slurm does not run it here any more, and its epilog did not report its end"


@dataclass(slots=True)
class _Followed:
    """A lease that is followed: what ends it."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome = Outcome.EXITED
    detail: str | None = None
    exit: Exit | None = None


class SlurmJobs:
    """Follows the leases of Slurm's jobs, and stops the jobs."""

    def __init__(
        self,
        clock: Clock,
        table: ProcessTable,
        processes: SlurmProcesses,
        marker_of: Callable[[JobId], str],
        levels: Callable[[], tuple[str, ...]],
        remove_limits: Callable[[Job], Awaitable[None]],
        grace: Callable[[], timedelta],
        run: RunSlurm = run_slurm,
    ) -> None:
        """`levels` are the enforcement levels of a lease, `grace` the daemon's setting."""
        self._clock = clock
        self._table = table
        self._processes = processes
        self._marker_of = marker_of
        self._levels = levels
        self._remove_limits = remove_limits
        self._grace = grace
        self._run = run
        self._followed: dict[JobId, _Followed] = {}
        self._complaints = LogOnce(_log)

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start nothing: Slurm does."""

    async def forbid(self, job: Job) -> bool:
        """Return False: Slurm has begun to start the job when it asks for the lease."""
        return False

    def was_launched(self, job: Job) -> bool:
        """Return True, see `forbid`."""
        return True

    async def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the lease: first that it is held, last how it ended."""
        followed = self._followed[job.id] = _Followed()
        try:
            at = job.started_at or self._clock.now()
            yield WorkerStarted(None, None, at, self._levels())
            await followed.ended.wait()
            await self._table.end(lambda: self._left(job), timedelta())
            await self._remove_limits(job)
            yield WorkerExited(followed.outcome, followed.exit, self._clock.now(), followed.detail)
        finally:
            if self._followed.get(job.id) is followed:
                del self._followed[job.id]

    async def ended(self, job: Job, exit_: Exit | None) -> None:
        """Note that Slurm has ended a job; its lease ends when no process is left."""
        signaled = exit_ is not None and exit_.signal is not None
        self._end(job, Outcome.SIGNALED if signaled else Outcome.EXITED, None, exit_)

    async def lost(self, job: Job) -> None:
        """Note that a job is gone, and that nobody knows how it ended."""
        self._end(job, Outcome.LOST, LOST, None)

    def _end(self, job: Job, outcome: Outcome, detail: str | None, exit_: Exit | None) -> None:
        # A lease that is not followed now ends later: Slurm does not know its job any more.
        followed = self._followed.get(job.id)
        if followed is not None and not followed.ended.is_set():
            followed.outcome, followed.detail, followed.exit = outcome, detail, exit_
            followed.ended.set()

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Have Slurm cancel the job, and kill what is left after the grace.

        While slurmctld is away, the processes here are ended without it.
        """
        own = self.grace(job)
        grace = own if grace is None else min(grace, own)
        if not await self._cancel(job, reason):
            await self._table.end(lambda: self._left(job), grace)
            return
        followed = self._followed.get(job.id)
        try:
            async with asyncio.timeout(grace.total_seconds()):
                await (followed.ended if followed is not None else asyncio.Event()).wait()
        except TimeoutError:
            await self._table.end(lambda: self._left(job), timedelta())

    async def _cancel(self, job: Job, reason: str) -> bool:
        """Have Slurm cancel a job, and note the reason; return whether it does."""
        assert job.slurm is not None, "it is a job of Slurm"
        number = job.slurm.id
        try:
            label = await label_of(self._run, number)
            before = await list_job(self._run, number, "--Format=JobID:|,admin_comment:")
            said = "; ".join(filter(None, split_hint(job.detail or reason)))
            why = f"{job.slurm.node}: {one_line(said)}"
            note = with_note(before, Note(why, stopped=reason))
            await self._run("scontrol", "update", f"jobid={label}", f"admincomment={note}")
            await self._run("scancel", label)
        except SlurmFailed as error:
            text = f"cannot have Slurm cancel job {number}, ending its processes here: {error}"
            self._complaints.say("scancel", text, why=str(error))
            return False
        self._complaints.passed("scancel")
        return True

    def _left(self, job: Job) -> set[Entry]:
        """Return the processes of a job, by Slurm or by their marker. Reads all of /proc, once."""
        assert job.slurm is not None, "it is a job of Slurm"
        number, there = job.slurm.id, list(processes())
        marker, owner = self._marker_of(job.id), job.owner.uid
        # A job that was submitted inside this one inherits its environment with the marker.
        marked = {
            each
            for each in self._table.survivors(marker, owner, among=there)
            if self._processes.job_of(each.pid) in (None, number)
        }
        return marked | self._processes.of_job(number, there)

    def grace(self, job: Job) -> timedelta:
        """Return the time between SIGTERM and SIGKILL."""
        return job.grace or self._grace()

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Change nothing: Slurm has the time limit, and lets only admins extend it."""

    async def notify(self, job: Job, text: str) -> None:
        """Write a line to the output of a batch job, or to the standard error of srun."""
        assert job.slurm is not None, "it is a job of Slurm"
        try:
            label = await label_of(self._run, job.slurm.id)
            await self._run("scontrol", "notify", label, f"gpulease: {one_line(text)}")
        except SlurmFailed as error:
            text = f"cannot notify job {job.slurm.id} of Slurm: {error}"
            self._complaints.say("notify", text, why=str(error))
        else:
            self._complaints.passed("notify")


class SlurmEnforcement:
    """Knows the levels of Slurm's jobs, and sets their limits."""

    def __init__(
        self,
        everywhere: Callable[[], tuple[str, ...]],
        limiter: Callable[[], MemoryLimiter | None],
        note: NoteLimits,
        run: RunSlurm = run_slurm,
        directory: Callable[[int], Path | None] = directory_of,
    ) -> None:
        """`everywhere` are the levels of all jobs; without a `limiter` the driver limits none."""
        self._everywhere = everywhere
        self._limiter = limiter
        self._note = note
        self._run = run
        self._directory = directory
        self._has_device_rules: bool | None = None
        """None: Slurm was not asked yet."""
        self._complaints = LogOnce(_log)

    def levels(self) -> tuple[str, ...]:
        """Return the levels of a job of Slurm that starts now, before limits are set."""
        devices = {EnforcementLevel.DEVICES} if self._has_device_rules else set()
        return in_level_order({*self._everywhere(), *devices})

    async def ask(self) -> None:
        """Ask Slurm once whether it lets jobs open only their own GPUs."""
        if self._has_device_rules is not None:
            return
        try:
            shown = await self._run("scontrol", "show", "config")
        except SlurmFailed as error:
            _log.debug("device rules of Slurm are not known yet: %s", error)
            return
        found = _TASK_CGROUP.search(shown) and _CONSTRAINED.search(shown)
        self._has_device_rules = found is not None

    async def limit(self, job: Job) -> None:
        """Let the driver limit a job that has a cgroup and no limit yet.

        Raises:
            RecordUnwritable: the limits cannot be stored now; they are in force.
        """
        limiter = self._limiter()
        if limiter is None or job.slurm is None:
            return
        directory = await asyncio.to_thread(self._directory, job.slurm.id)
        if directory is None:
            return
        limits: dict[GpuUuid, int | None] = {}
        for lease in job.leases:
            if lease.driver_limit is not None:
                continue
            try:
                limits[lease.gpu] = await asyncio.to_thread(
                    limiter.set_limit, lease.gpu, directory, lease.memory
                )
                self._complaints.passed(lease.gpu)
            except NotLimited as error:
                text = f"job {job.id}: no limit of the driver on {lease.gpu}: {error}"
                self._complaints.say(lease.gpu, text, why=str(error))
        if limits:
            await self._note(job.id, limits, "the driver limits it, in Slurm's cgroup")
