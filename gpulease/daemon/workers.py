"""The launcher port: a granted lease becomes an environment, the environment a running worker.

Where the worker's side (what a job finds) and the process side (how it is started) meet.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpulease.daemon.shims import has_scope, living_shim, session_of
from gpulease.daemon.state import StateDirectory
from gpulease.domain.job import Exit, Invocation, Job, Outcome
from gpulease.domain.memory import GpuReading, GpuUuid, JobId
from gpulease.domain.overhead import Kind
from gpulease.errors import LaunchFailed, RecordUnwritable
from gpulease.process import control, tree
from gpulease.process.launcher import AlreadyLaunched, Identity, Launch, Launcher
from gpulease.process.orders import EarlySignalOrder, TerminalOrder
from gpulease.process.proc import deliver
from gpulease.process.record import forbid, read_record
from gpulease.process.table import ProcessTable
from gpulease.service.ports import (
    Clock,
    MainExited,
    WorkerExited,
    WorkerExpired,
    WorkerNews,
    WorkerStarted,
)
from gpulease.worker.environment import (
    Beside,
    LeasedGpu,
    WorkerOptions,
    worker_environment,
)
from gpulease.worker.overhead import outside_the_pool

_log = logging.getLogger(__name__)

_SHIM_OBEYS_WITHIN_S = 10.0
"""A shim answers in milliseconds, unless its user has stopped it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a launch needs to know of the daemon and the machine."""

    installation: str
    """Tells our processes from those of another daemon on this machine."""
    as_other_users: bool
    """The daemon is root, and becomes whoever asked."""
    simulated: bool
    driver: Callable[[], str | None]
    readings: Callable[[], Mapping[GpuUuid, GpuReading]]
    hooks: Path
    grace: timedelta
    log_limit: int
    rungs: Callable[[], tuple[str, ...]] = tuple
    """What holds every lease here, see enforcement.Rung."""
    lift: Callable[[Job], Awaitable[None]] | None = None
    """Takes away what the driver holds an ended job by."""
    socket: str = ""
    """Where the hooks in jobs may tell what they see."""
    beside: Callable[[int, Kind, int], int] = lambda uid, kind, start: start
    """Tells what was learnt of frameworks, for the jobs of a user, from where it starts."""


class Workers:
    """Starts the workers of jobs, each below a shim of its own, and brings news of them."""

    def __init__(
        self,
        launcher: Launcher,
        processes: ProcessTable,
        state: StateDirectory,
        around: Surroundings,
        clock: Clock,
    ) -> None:
        self._processes = processes
        self._launcher = launcher
        self._state = state
        self._around = around
        self._clock = clock

    def adopt(self, grace: timedelta, log_limit: int) -> None:
        """Use these for what is launched or stopped from now on."""
        self._around = replace(self._around, grace=grace, log_limit=log_limit)

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
            await self._launcher.launch(self._launch(job, invocation, directory))
        except AlreadyLaunched:
            # By the daemon before this one, in the moment of its end: follow that one.
            return
        except ValueError as error:
            raise LaunchFailed(f"cannot start job {job.id}: {error}") from error

    def _make(self, job: Job, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o711, exist_ok=True)
            directory.chmod(0o711)
        except OSError as error:
            raise _unwritable(job, error) from error

    def _launch(self, job: Job, invocation: Invocation, directory: Path) -> Launch:
        owner = job.owner
        identity = Identity(owner.uid, owner.gid, owner.user, invocation.groups)
        return Launch(
            job=job.id,
            directory=directory,
            argv=invocation.argv,
            cwd=invocation.cwd,
            environment=self.environment(job, invocation),
            identity=identity if self._around.as_other_users else None,
            umask=invocation.umask,
            soft_limits=invocation.soft_limits,
            nice=invocation.nice,
            stdin=invocation.attached,
            awaits_attach=invocation.attached,
            time_limit=job.claim.time_limit,
            grace=self.grace(job),
            log_limit=self._around.log_limit,
            terminal=_terminal(invocation),
            early_signal=_early_signal(invocation),
            # A user may ask for an hour; whoever shuts the machine down did not agree to that.
            grace_at_shutdown=min(self.grace(job), self._around.grace),
            gpus=self._nodes(job),
            memory={lease.gpu: lease.memory for lease in job.leases},
        )

    def _nodes(self, job: Job) -> tuple[str, ...] | None:
        """Return the device nodes of the job's GPUs; None if there are none, or not all known."""
        readings = self._around.readings()
        found = [readings.get(lease.gpu) for lease in job.leases]
        nodes = [_nodes_of(reading) for reading in found]
        known = [node for each in nodes for node in each or ()]
        return tuple(known) if known and all(each is not None for each in nodes) else None

    def environment(self, job: Job, invocation: Invocation) -> dict[str, str]:
        """Return the variables of `invocation` as they are under the leases of `job`."""
        readings = self._around.readings()
        return worker_environment(
            invocation.environment,
            job=str(job.id),
            marker=self._marker(job.id),
            gpus=[
                _leased(lease.gpu, lease.memory, readings.get(lease.gpu)) for lease in job.leases
            ],
            simulated=self._around.simulated,
            driver=self._around.driver(),
            hooks=self._around.hooks,
            options=_options(invocation.options),
            beside=self._beside(job),
            daemon=self._around.socket,
        )

    def _beside(self, job: Job) -> Beside:
        """Return what tells how much a framework takes beside its pool, for who owns `job`."""
        around, gpus, driver = self._around, len(job.leases), self._around.driver()

        def beside(framework: str, gpu: LeasedGpu) -> int:
            start = outside_the_pool(framework, gpus, gpu.name, driver)
            kind = Kind(framework, gpu.name, driver or "", gpus)
            return around.beside(job.owner.uid, kind, start)

        return beside

    def _marker(self, job: JobId) -> str:
        return f"{self._around.installation}/{job}"

    async def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the worker of `job`, from its start on; ends with WorkerExited."""
        directory = self._state.job(job.id)
        async for event in control.follow(directory):
            lost = isinstance(event, control.Lost)
            news = await self._bury(job) if lost else _news(event)
            if isinstance(news, WorkerStarted):
                yield replace(news, rungs=self._around.rungs())
            elif news is not None:
                if isinstance(news, WorkerExited) and self._around.lift is not None:
                    await self._around.lift(job)
                yield news

    async def _bury(self, job: Job) -> WorkerExited:
        """End what is left of a job whose shim died; its memory is not free before."""
        marker, owner = self._marker(job.id), job.owner.uid
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
                await control.set_time_limit(directory, limit)
        except TimeoutError:
            _log.warning("the shim of job %s does not listen: its time limit stays", job.id)

    async def notify(self, job: Job, text: str) -> None:
        """Write a line into the job's output; one that cannot be written is let go."""
        directory = self._state.job(job.id)
        self._wake(directory)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHIM_OBEYS_WITHIN_S):
                await control.notify(directory, text)

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Ask the worker to go, and after a grace make it go: the job's own, or a shorter one."""
        directory, own = self._state.job(job.id), self.grace(job)
        grace = own if grace is None else min(grace, own)
        try:
            # The user may have stopped the shim, which is theirs; that must not keep it from this.
            self._wake(directory)
            async with asyncio.timeout(_SHIM_OBEYS_WITHIN_S):
                await control.stop(directory, reason, grace)
        except TimeoutError:
            _log.warning("the shim of job %s does not listen: it is killed, and its job", job.id)
            await asyncio.to_thread(self._kill, directory)
            return
        await self._see_it_gone(directory, grace)

    def grace(self, job: Job) -> timedelta:
        """Return how long the worker has to go: as its owner asked, or as it is configured."""
        return self._around.grace if job.grace is None else job.grace

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
            tree.kill(shim.pid)
            deliver(shim, signal.SIGKILL)


def _unwritable(job: Job, error: OSError) -> RecordUnwritable:
    return RecordUnwritable(
        f"cannot start job {job.id}: its directory cannot be made: {error.strerror}",
        "an admin should see that the state directory can be written",
    )


def _nodes_of(reading: GpuReading | None) -> tuple[str, ...] | None:
    """Return the device nodes that a program opens for one GPU; None where that is not known."""
    if reading is None or reading.minor is None:
        return None
    beside = () if reading.parent is None else reading.access
    return None if beside is None else (f"/dev/nvidia{reading.minor}", *beside)


def _leased(uuid: GpuUuid, memory: int, reading: GpuReading | None) -> LeasedGpu:
    """Return the lease as the worker's side wants it; a GPU just lost is as large as its lease."""
    if reading is None:
        return LeasedGpu(uuid, 0, "unknown", memory, memory)
    return LeasedGpu(uuid, reading.index, reading.name, memory, reading.total or memory)


def _terminal(invocation: Invocation) -> TerminalOrder | None:
    wanted = invocation.terminal
    if wanted is None:
        return None
    return TerminalOrder(wanted.rows, wanted.columns, wanted.attributes, wanted.stderr)


def _early_signal(invocation: Invocation) -> EarlySignalOrder | None:
    wanted = invocation.early_signal
    return (
        None if wanted is None else EarlySignalOrder(wanted.signal, wanted.before.total_seconds())
    )


def _options(given: Mapping[str, Any]) -> WorkerOptions:
    """Return the options as the worker's side names them; they were checked when submitted."""
    renamed = {"inter_op_threads": "inter_op", "intra_op_threads": "intra_op"}
    return WorkerOptions(**{renamed.get(name, name): value for name, value in given.items()})


_OUTCOMES = {
    "exited": Outcome.EXITED,
    "signaled": Outcome.SIGNALED,
    "cancelled": Outcome.CANCELLED,
    "time_limit": Outcome.TIME_LIMIT,
    "over_lease": Outcome.OVER_LEASE,
    "idle": Outcome.IDLE,
    "launch_failed": Outcome.LAUNCH_FAILED,
}


def _news(event: control.ShimEvent) -> WorkerNews | None:
    match event:
        case control.Started():
            return WorkerStarted(event.pid, event.shim_pid, event.started_at)
        case control.Stopping():
            return WorkerExpired() if event.reason == "time_limit" else None
        case control.MainExited():
            return MainExited(Exit(event.exit_code, event.signal), event.at)
        case control.Exited():
            return _exited(event)
        case control.Lost():
            return None


def _exited(event: control.Exited) -> WorkerExited:
    outcome = _OUTCOMES.get(event.reason, Outcome.CANCELLED)
    exit_ = Exit(event.exit_code, event.signal)
    if event.failed is not None:
        exit_ = Exit(event.failed.exit_code)
    detail = event.failed.message if event.failed is not None else None
    return WorkerExited(outcome, exit_, event.ended_at, detail)
