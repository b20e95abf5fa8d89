"""The launcher port for jobs: start the worker of a granted job, follow it, and stop it.

Each worker runs below a shim, which `shim_control` talks to. Where a shim cannot be asked, because
the job's directory is missing or the shim is stopped or killed, the processes are ended directly.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from gpulease.domain.enforcement import EnforcementLevel
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Exit, HostUse, Invocation, Job, Outcome
from gpulease.errors import LaunchFailed, RecordUnwritable
from gpulease.host import shim_control
from gpulease.host.cores import take_cores
from gpulease.host.launch import (
    LaunchContext,
    command_of,
    environment_of,
    grace_of,
    launch_of,
    marker_of,
)
from gpulease.host.launcher import AlreadyLaunched, Launcher
from gpulease.host.processes import ProcessTable
from gpulease.host.shim_control import (
    has_scope,
    living_shim,
    session_of,
    session_on_record,
    shim_on_record,
    system_started_at,
)
from gpulease.host.state_dir import StateDirectory
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import (
    Clock,
    MainExited,
    WorkerExited,
    WorkerExpired,
    WorkerNews,
    WorkerStarted,
)
from gpulease.shared_calls import SharedCalls
from gpulease.shim import process_tree
from gpulease.shim.process_tree import Entry, deliver
from gpulease.shim.record import forbid, read_record
from gpulease.units import format_size

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0
_CONTAINER_TAKES_S = 0.1
"""An engine takes longer to start a container. So a look that has found none is good for jobs that
end within this time; under load they end faster than a look at all processes takes."""
_SHIM_ANSWERS_WITHIN_S = 10.0
"""A shim answers in milliseconds, unless its user has stopped it."""


class JobRunner:
    """Starts the workers of jobs, each below its shim, and reports what happens to them."""

    def __init__(
        self,
        launcher: Launcher,
        processes: ProcessTable,
        state: StateDirectory,
        context: LaunchContext,
        clock: Clock,
    ) -> None:
        self._processes = processes
        self._launcher = launcher
        self._state = state
        self._context = context
        self._clock = clock
        self._complaints = LogOnce(_log)
        # A look reads a part of /proc.
        self._in_containers = SharedCalls()
        self._without_record: set[JobId] = set()
        """Jobs that have processes but no record in their directory."""
        self._end_reasons: dict[JobId, Outcome] = {}
        """Why jobs were ended whose shims could not be asked to end them."""

    def adopt(self, grace: timedelta, log_limit: int, keep_free: int) -> None:
        """Use these settings from now on."""
        self._context = replace(
            self._context, grace=grace, log_limit=log_limit, keep_free=keep_free
        )

    def was_launched(self, job: Job) -> bool:
        """Return whether a launch of `job` has begun, by this daemon or an earlier one."""
        return read_record(self._state.job(job.id)) is not None

    async def forbid(self, job: Job) -> bool:
        """Make sure that no launch of `job` can begin any more; False if one has begun.

        Raises:
            RecordUnwritable: the record cannot be written at this moment.
        """
        directory = self._state.job(job.id)
        self._make_directory(job, directory)
        try:
            return await asyncio.to_thread(forbid, directory)
        except OSError as error:
            raise _unwritable(job, error) from error

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start the worker of `job`, at most once in its life.

        Raises:
            RecordUnwritable: it cannot be started at this moment.
            GpuleaseError: it cannot be started.
        """
        directory = self._state.job(job.id)
        self._make_directory(job, directory)
        try:
            cores = self._take_cores(job, directory)
            launch = launch_of(job, invocation, directory, self._context, cores)
            await self._launcher.launch(launch)
        except AlreadyLaunched:
            # By an earlier daemon, just before it ended: follow that launch.
            return
        except ValueError as error:
            raise LaunchFailed(f"cannot start job {job.id}: {error}") from error
        if launch.notice:
            await self.notify(job, launch.notice)

    def _take_cores(self, job: Job, directory: Path) -> tuple[int, ...]:
        """Choose the cores of a job that leases some, and note them."""
        if job.claim.cpus is None:
            return ()
        holding = (each.id for each in self._context.holding() if each.claim.cpus is not None)
        readings = self._context.readings()
        known = (readings.get(lease.gpu) for lease in job.leases)
        buses = [reading.bus for reading in known if reading is not None]
        try:
            return take_cores(job.claim.cpus, directory, map(self._state.job, holding), buses)
        except OSError as error:
            raise _unwritable(job, error) from error

    def _make_directory(self, job: Job, directory: Path) -> None:
        try:
            try:
                directory.mkdir(exist_ok=True)
            except FileNotFoundError:
                self._state.ensure_jobs()
                directory.mkdir(exist_ok=True)
            directory.chmod(0o711)
        except OSError as error:
            raise _unwritable(job, error) from error

    def environment(self, job: Job, invocation: Invocation, whole: Job) -> dict[str, str]:
        """Return the environment of `invocation` under the leases of `job`, a part of `whole`."""
        limits = {
            lease.gpu: lease.driver_limit for lease in job.leases if lease.driver_limit is not None
        }
        exclusive = all(
            EnforcementLevel.DEVICES in (lease.enforced_by or ()) for lease in job.leases
        )
        return environment_of(job, invocation, self._context, limits, exclusive, whole)

    def command(self, job: Job, invocation: Invocation) -> tuple[Sequence[str], str]:
        """Return the command of `invocation` under the leases of `job`, and a line about it."""
        return command_of(job, invocation, self._context)

    async def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the worker of `job` from its start on, last WorkerExited."""
        while True:
            async for news in self._events_of(job):
                if isinstance(news, WorkerStarted):
                    yield replace(news, levels=self._context.levels())
                    continue
                if not isinstance(news, WorkerExited):
                    yield news
                    continue
                await self._end_containers(job, news)
                if self._context.remove_limits is not None:
                    await self._context.remove_limits(job)
                yield self._with_reason(job, news)
                return

    async def _end_containers(self, job: Job, news: WorkerExited) -> None:
        """End the containers that the worker has left behind; they may still hold memory.

        The processes of a docker container are not below the shim, and survive their client.
        """
        find = self._processes.containers.look
        look = partial(asyncio.to_thread, find)
        if not await self._in_containers(look, fresh_for=_CONTAINER_TAKES_S):
            return
        by_itself = news.outcome in (Outcome.EXITED, Outcome.SIGNALED)
        # A job that was stopped has had its grace.
        grace = self.grace(job) if by_itself else timedelta()
        marker = marker_of(job.id, self._context)
        left = partial(self._processes.in_containers, marker, job.owner.uid)
        await self._processes.end(left, grace)

    def _with_reason(self, job: Job, news: WorkerExited) -> WorkerExited:
        """Return `news` with the reason that could not be sent to the job's shim."""
        reason = self._end_reasons.pop(job.id, None)
        by_itself = news.outcome in (Outcome.EXITED, Outcome.SIGNALED)
        return replace(news, outcome=reason) if reason is not None and by_itself else news

    async def _events_of(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield events. The last is not WorkerExited if a missing record came back."""
        record = read_record(self._state.job(job.id))
        if record is not None and record.exited is not None and record.stopping is None:
            # Most short jobs: start and end are stored at once, and the shim is not asked.
            start = None
            if (begun := record.started) is not None:
                levels = self._context.levels()
                start = WorkerStarted(begun.pid, begun.shim_pid, begun.started_at, levels)
            yield replace(worker_exited(record.exited), started=start)
            return
        async for event in shim_control.follow(self._state.job(job.id)):
            if isinstance(event, shim_control.Missing):
                async for each in self._follow_without_record(job):
                    yield each
                return
            lost = isinstance(event, shim_control.Lost)
            news = await self._end_leftovers(job) if lost else _worker_news(event)
            if news is not None:
                yield news

    async def _follow_without_record(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Follow the processes of a job until its record comes back or no process is left."""
        if job.started_at is not None:
            # Not new. But if the job is to stop, this event makes the caller stop it again.
            yield WorkerStarted(job.pid, job.shim_pid, job.started_at)
        try:
            while True:
                left = await asyncio.to_thread(self._processes_of, job)
                # The record last: processes that ended meanwhile may have left one.
                if self.was_launched(job):
                    return
                if not left:
                    break
                self._without_record.add(job.id)
                directory = self._state.job(job.id)
                text = f"{directory} is missing; the processes of job {job.id} continue"
                # Logged once for all jobs.
                self._complaints.say("record", text, why="missing")
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._without_record.discard(job.id)
            if not self._without_record:
                self._complaints.passed("record")
        why = "its directory was removed, so how it ended is not known"
        yield WorkerExited(Outcome.LOST, None, self._clock.now(), why)

    def _processes_of(self, job: Job) -> set[Entry]:
        marker = marker_of(job.id, self._context)
        shim, session = shim_on_record(job), session_on_record(job)
        return self._processes.of_job(job.id, marker, job.owner.uid, shim, session)

    async def _end_leftovers(self, job: Job) -> WorkerExited:
        """End the remaining processes of a job whose shim died; they may still hold memory."""
        marker, owner = marker_of(job.id, self._context), job.owner.uid
        directory = self._state.job(job.id)
        session = session_of(directory)
        scope = job.id if has_scope(directory) else None
        await self._processes.end_survivors(marker, self.grace(job), owner, session, scope)
        why = "its shim was killed or the machine was restarted, so how it ended is not known"
        return WorkerExited(Outcome.LOST, None, self._clock.now(), why)

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Let the worker run for `limit` from its start, if the shim answers."""
        directory = self._state.job(job.id)
        await self._ask(directory, shim_control.set_time_limit(directory, limit))

    async def notify(self, job: Job, text: str) -> None:
        """Write a line to the job's output, if the shim answers."""
        directory = self._state.job(job.id)
        await self._ask(directory, shim_control.notify(directory, text))

    async def _ask(self, directory: Path, request: Awaitable[bool]) -> None:
        self._wake(directory)
        with contextlib.suppress(TimeoutError):  # its user may have stopped it again
            async with asyncio.timeout(_SHIM_ANSWERS_WITHIN_S):
                await request

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Send SIGTERM to the worker, and SIGKILL after the job's grace or a shorter one."""
        directory, own = self._state.job(job.id), self.grace(job)
        grace = own if grace is None else min(grace, own)
        try:
            # The user may have stopped the shim, which runs as the user.
            self._wake(directory)
            async with asyncio.timeout(_SHIM_ANSWERS_WITHIN_S):
                is_asked = await shim_control.stop(directory, reason, grace)
        except TimeoutError:
            _log.info("the shim of job %s does not answer: killing it and the job", job.id)
            await asyncio.to_thread(self._kill, directory)
            return
        if not is_asked and not self.was_launched(job):
            self._end_reasons[job.id] = _outcome(reason)
            # Its socket is missing, so the shim cannot be asked.
            if (shim := shim_on_record(job)) is not None:
                deliver(shim, signal.SIGCONT)
            await self._processes.end(lambda: self._processes_of(job), grace)
            return
        await self._ensure_gone(directory, grace)

    def grace(self, job: Job) -> timedelta:
        """Return the time between SIGTERM and SIGKILL: the owner's choice, or the setting."""
        return grace_of(job, self._context)

    def _wake(self, directory: Path) -> None:
        if (shim := living_shim(directory)) is not None:
            deliver(shim, signal.SIGCONT)

    async def _ensure_gone(self, directory: Path, grace: timedelta) -> None:
        """Kill the shim and all processes below it if it does not end in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace.total_seconds() + _SHIM_ANSWERS_WITHIN_S
        while loop.time() < deadline:
            if living_shim(directory) is None:
                return
            await asyncio.sleep(1)
        await asyncio.to_thread(self._kill, directory)

    def _kill(self, directory: Path) -> None:
        shim = living_shim(directory)
        if shim is not None:
            process_tree.kill(shim.pid)
            deliver(shim, signal.SIGKILL)


def _unwritable(job: Job, error: OSError) -> RecordUnwritable:
    return RecordUnwritable(
        f"cannot start job {job.id}: cannot create its directory: {error.strerror}",
        "ask an admin to make the state directory writable",
    )


def _outcome(reason: str) -> Outcome:
    """Return the outcome that a record gives as its reason; a shim may be stopped for others."""
    return Outcome(reason) if reason in set(Outcome) else Outcome.CANCELLED


def _worker_news(event: shim_control.ShimEvent) -> WorkerNews | None:
    match event:
        case shim_control.Started():
            return WorkerStarted(event.pid, event.shim_pid, event.started_at)
        case shim_control.Stopping():
            return WorkerExpired() if event.reason == "time_limit" else None
        case shim_control.MainExited():
            return MainExited(Exit(event.exit_code, event.signal), event.at)
        case shim_control.Exited():
            return worker_exited(event)
        case shim_control.Lost() | shim_control.Missing():
            return None


def worker_exited(event: shim_control.Exited) -> WorkerExited:
    """Return the end of a worker, as its record has it."""
    outcome = _outcome(event.reason)
    exit_ = Exit(event.exit_code, event.signal)
    if event.failed is not None:
        exit_ = Exit(event.failed.exit_code)
    detail = event.failed.message if event.failed is not None else _short_of_ram(event)
    used = event.host_use
    # Of a job that began just before a reboot, the daemon may know the end alone.
    rebooted = event.ended_at.timestamp() < system_started_at()
    return WorkerExited(
        outcome,
        exit_,
        event.ended_at,
        detail,
        by_shutdown=event.terminated and rebooted,
        # A SIGTERM to all processes, such as that of a shutdown, is no failure of the job.
        interrupted=event.interrupted or event.terminated,
        host_use=HostUse(
            used.ram_peak, None if used.cpu_s is None else timedelta(seconds=used.cpu_s)
        ),
        ram_limit=used.ram_limit,
    )


def _short_of_ram(event: shim_control.Exited) -> str | None:
    """Return how a job ended of which the kernel killed processes; None if it killed none."""
    used, by_itself = event.host_use, event.reason in (Outcome.EXITED, Outcome.SIGNALED)
    # A program that starts its killed process again, and succeeds, has no problem.
    if not used.oom_kills or not by_itself or event.exit_code == 0:
        return None
    how = Exit(event.exit_code, event.signal).verb
    count = used.oom_kills
    killer = "gpulease" if used.watched else "the kernel"
    killed = f"{killer} killed {'one' if count == 1 else count} of its processes"
    if used.ram_limit is not None:
        return f"{how}: it used all of its {format_size(used.ram_limit)} of RAM, and {killed}"
    what = f"{how}: the machine ran out of RAM, and {killed}"
    peak = used.ram_peak
    return what if peak is None else f"{what}; the job used up to {format_size(peak)}"
