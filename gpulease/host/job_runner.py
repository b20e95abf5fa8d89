"""The launcher port: a granted lease becomes an environment, the environment a running worker.

Where the worker's side (what a job finds) and the process side (how it is started) meet.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from gpulease.domain.enforcement import EnforcementLevel
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Exit, Invocation, Job, Outcome
from gpulease.errors import LaunchFailed, RecordUnwritable
from gpulease.host import shim_control
from gpulease.host.launch import LaunchContext, environment_of, grace_of, launch_of, marker_of
from gpulease.host.launcher import AlreadyLaunched, Launcher
from gpulease.host.processes import ProcessTable
from gpulease.host.shim_control import (
    has_scope,
    living_shim,
    session_of,
    session_on_record,
    shim_on_record,
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
from gpulease.shim import process_tree
from gpulease.shim.process_tree import Entry, deliver
from gpulease.shim.record import forbid, read_record

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0
_SHIM_OBEYS_WITHIN_S = 10.0
"""A shim answers in milliseconds, unless its user has stopped it."""


class JobRunner:
    """Starts the workers of jobs, each below a shim of its own, and brings news of them."""

    def __init__(
        self,
        launcher: Launcher,
        processes: ProcessTable,
        state: StateDirectory,
        around: LaunchContext,
        clock: Clock,
    ) -> None:
        self._processes = processes
        self._launcher = launcher
        self._state = state
        self._around = around
        self._clock = clock
        self._complaints = LogOnce(_log)
        self._without_record: set[JobId] = set()
        """Jobs with processes and without a record in their directory."""
        self._ended_for: dict[JobId, Outcome] = {}
        """Why the processes of jobs were ended whose shims could not be asked to."""

    def adopt(self, grace: timedelta, log_limit: int, keep_free: int) -> None:
        """Use these for what is launched or stopped from now on."""
        self._around = replace(self._around, grace=grace, log_limit=log_limit, keep_free=keep_free)

    def was_launched(self, job: Job) -> bool:
        """Tell whether a launch of `job` has begun, by this daemon or one before it."""
        return read_record(self._state.job(job.id)) is not None

    async def forbid(self, job: Job) -> bool:
        """See that no launch of `job` can begin any more; False if one has begun.

        Raises:
            RecordUnwritable: that cannot be had at this moment.
        """
        directory = self._state.job(job.id)
        self._make(job, directory)
        try:
            return await asyncio.to_thread(forbid, directory)
        except OSError as error:
            raise _unwritable(job, error) from error

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start the worker of `job`, at most once in its life.

        Raises:
            RecordUnwritable: it could not be started at this moment.
            GpuleaseError: it could not be started, and never will be.
        """
        directory = self._state.job(job.id)
        self._make(job, directory)
        try:
            await self._launcher.launch(launch_of(job, invocation, directory, self._around))
        except AlreadyLaunched:
            # By the daemon before this one, in the moment of its end: follow that one.
            return
        except ValueError as error:
            raise LaunchFailed(f"cannot start job {job.id}: {error}") from error

    def _make(self, job: Job, directory: Path) -> None:
        try:
            self._state.ensure_jobs()
            directory.mkdir(mode=0o711, exist_ok=True)
            directory.chmod(0o711)
        except OSError as error:
            raise _unwritable(job, error) from error

    def environment(self, job: Job, invocation: Invocation) -> dict[str, str]:
        """Return the variables of `invocation` as they are under the leases of `job`."""
        kept = {str(lease.gpu): lease.driver_limit for lease in job.leases}
        limits = {gpu: limit for gpu, limit in kept.items() if limit is not None}
        alone = all(EnforcementLevel.DEVICES in (lease.enforced_by or ()) for lease in job.leases)
        return environment_of(job, invocation, self._around, limits, alone)

    async def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the worker of `job`, from its start on; ends with WorkerExited."""
        while True:
            async for news in self._news_of(job):
                if isinstance(news, WorkerStarted):
                    yield replace(news, levels=self._around.rungs())
                    continue
                if not isinstance(news, WorkerExited):
                    yield news
                    continue
                if self._around.lift is not None:
                    await self._around.lift(job)
                yield self._with_reason(job, news)
                return

    def _with_reason(self, job: Job, news: WorkerExited) -> WorkerExited:
        """Return an end with the reason that the shim of the job was not told."""
        reason = self._ended_for.pop(job.id, None)
        by_itself = news.outcome in (Outcome.EXITED, Outcome.SIGNALED)
        return replace(news, outcome=reason) if reason is not None and by_itself else news

    async def _news_of(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield news; ends without WorkerExited if the record was missing and is there again."""
        async for event in shim_control.follow(self._state.job(job.id)):
            if isinstance(event, shim_control.Missing):
                async for each in self._follow_without_record(job):
                    yield each
                return
            lost = isinstance(event, shim_control.Lost)
            news = await self._bury(job) if lost else _news(event)
            if news is not None:
                yield news

    async def _follow_without_record(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Follow the processes of a job until its record is there again or none of them is left."""
        if job.started_at is not None:
            # Known before. If the job was asked to go, it is asked again on hearing this.
            yield WorkerStarted(job.pid, job.shim_pid, job.started_at)
        try:
            while True:
                left = await asyncio.to_thread(self._processes_of, job)
                # Asked last: processes that ended meanwhile may have left a record that is back.
                if self.was_launched(job):
                    return
                if not left:
                    break
                self._say_without_record(job)
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._without_record.discard(job.id)
            if not self._without_record:
                self._complaints.passed("record")
        why = "its directory was removed, so how it ended is not known"
        yield WorkerExited(Outcome.LOST, None, self._clock.now(), why)

    def _say_without_record(self, job: Job) -> None:
        """Complain once, however many jobs it concerns."""
        self._without_record.add(job.id)
        text = f"{self._state.job(job.id)} is missing; the processes of job {job.id} go on"
        self._complaints.say("record", text, why="missing")

    def _processes_of(self, job: Job) -> set[Entry]:
        marker = marker_of(job.id, self._around)
        shim, session = shim_on_record(job), session_on_record(job)
        return self._processes.of_job(job.id, marker, job.owner.uid, shim, session)

    async def _bury(self, job: Job) -> WorkerExited:
        """End what is left of a job whose shim died; its memory is not free before."""
        marker, owner = marker_of(job.id, self._around), job.owner.uid
        directory = self._state.job(job.id)
        session = session_of(directory)
        scope = job.id if has_scope(directory) else None
        await self._processes.end_survivors(marker, self.grace(job), owner, session, scope)
        why = (
            "its shim is gone (killed, or the machine was restarted), so how it ended is not known"
        )
        return WorkerExited(Outcome.LOST, None, self._clock.now(), why)

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Let the worker run for `limit` from its start."""
        directory = self._state.job(job.id)
        try:
            self._wake(directory)
            async with asyncio.timeout(_SHIM_OBEYS_WITHIN_S):
                await shim_control.set_time_limit(directory, limit)
        except TimeoutError:
            # Its user may have stopped it, as often as they like.
            _log.debug("the shim of job %s does not listen: its time limit stays", job.id)

    async def notify(self, job: Job, text: str) -> None:
        """Write a line into the job's output; one that cannot be written is let go."""
        directory = self._state.job(job.id)
        self._wake(directory)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHIM_OBEYS_WITHIN_S):
                await shim_control.notify(directory, text)

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Ask the worker to go, and after a grace make it go: the job's own, or a shorter one."""
        directory, own = self._state.job(job.id), self.grace(job)
        grace = own if grace is None else min(grace, own)
        try:
            # The user may have stopped the shim, which is theirs; that must not keep it from this.
            self._wake(directory)
            async with asyncio.timeout(_SHIM_OBEYS_WITHIN_S):
                is_told = await shim_control.stop(directory, reason, grace)
        except TimeoutError:
            _log.info("the shim of job %s does not listen: it is killed, and its job", job.id)
            await asyncio.to_thread(self._kill, directory)
            return
        if not is_told and not self.was_launched(job):
            self._ended_for[job.id] = _OUTCOMES.get(reason, Outcome.CANCELLED)
            await self._end_without_record(job, grace)
            return
        await self._see_it_gone(directory, grace)

    async def _end_without_record(self, job: Job, grace: timedelta) -> None:
        """End the processes of a job whose shim cannot be asked: its socket is missing."""
        if (shim := shim_on_record(job)) is not None:
            deliver(shim, signal.SIGCONT)
        await self._processes.end(lambda: self._processes_of(job), grace)

    def grace(self, job: Job) -> timedelta:
        """Return how long the worker has to go: as its owner asked, or as it is configured."""
        return grace_of(job, self._around)

    def _wake(self, directory: Path) -> None:
        if (shim := living_shim(directory)) is not None:
            deliver(shim, signal.SIGCONT)

    async def _see_it_gone(self, directory: Path, grace: timedelta) -> None:
        """Kill the shim and all below it where it does not do so itself."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace.total_seconds() + _SHIM_OBEYS_WITHIN_S
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
        f"cannot start job {job.id}: its directory cannot be made: {error.strerror}",
        "an admin should see that the state directory can be written",
    )


_OUTCOMES = {
    "exited": Outcome.EXITED,
    "signaled": Outcome.SIGNALED,
    "cancelled": Outcome.CANCELLED,
    "time_limit": Outcome.TIME_LIMIT,
    "over_lease": Outcome.OVER_LEASE,
    "idle": Outcome.IDLE,
    "launch_failed": Outcome.LAUNCH_FAILED,
}


def _news(event: shim_control.ShimEvent) -> WorkerNews | None:
    match event:
        case shim_control.Started():
            return WorkerStarted(event.pid, event.shim_pid, event.started_at)
        case shim_control.Stopping():
            return WorkerExpired() if event.reason == "time_limit" else None
        case shim_control.MainExited():
            return MainExited(Exit(event.exit_code, event.signal), event.at)
        case shim_control.Exited():
            return _exited(event)
        case shim_control.Lost() | shim_control.Missing():
            return None


def _exited(event: shim_control.Exited) -> WorkerExited:
    outcome = _OUTCOMES.get(event.reason, Outcome.CANCELLED)
    exit_ = Exit(event.exit_code, event.signal)
    if event.failed is not None:
        exit_ = Exit(event.failed.exit_code)
    detail = event.failed.message if event.failed is not None else None
    return WorkerExited(outcome, exit_, event.ended_at, detail)
