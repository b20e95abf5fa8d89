"""How a granted job is started: lease and invocation become an environment and a launch."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import Lease
from gpulease.domain.memory_estimate import OverheadKey
from gpulease.host.launcher import Launch, UserIdentity
from gpulease.shim.launch_request import EarlySignalSpec, TerminalSpec
from gpulease.worker.environment import (
    LeasedGpu,
    OverheadOf,
    WorkerOptions,
    default_overhead,
    worker_environment,
)

_NO_LIMITS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LaunchContext:
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
    keep_free: int = 0
    """Bytes of the disk that logs leave free."""
    rungs: Callable[[], tuple[str, ...]] = tuple
    """What holds every lease here, see enforcement.Rung."""
    lift: Callable[[Job], Awaitable[None]] | None = None
    """Takes away what the driver holds an ended job by."""
    socket: str = ""
    """Where the hooks in jobs may tell what they see."""
    beside: Callable[[int, OverheadKey, int], int] = lambda uid, kind, start: start
    """Tells what was learnt of frameworks, for the jobs of a user, from where it starts."""


def launch_of(job: Job, invocation: Invocation, directory: Path, around: LaunchContext) -> Launch:
    """Return how the worker of `job` is to be started.

    Raises:
        ValueError: the lease cannot be told to the job.
    """
    owner = job.owner
    identity = UserIdentity(owner.uid, owner.gid, owner.user, invocation.groups)
    return Launch(
        job=job.id,
        directory=directory,
        argv=invocation.argv,
        cwd=invocation.cwd,
        environment=environment_of(job, invocation, around),
        identity=identity if around.as_other_users else None,
        umask=invocation.umask,
        soft_limits=invocation.soft_limits,
        nice=invocation.nice,
        stdin=invocation.attached,
        awaits_attach=invocation.attached,
        time_limit=job.claim.time_limit,
        grace=grace_of(job, around),
        log_limit=around.log_limit,
        keep_free=around.keep_free,
        terminal=_terminal(invocation),
        early_signal=_early_signal(invocation),
        # A user may ask for an hour; whoever shuts the machine down did not agree to that.
        grace_at_shutdown=min(grace_of(job, around), around.grace),
        gpus=_nodes(job, around),
        memory={lease.gpu: lease.memory for lease in job.leases},
        environment_within=partial(environment_of, job, invocation, around),
    )


def _nodes(job: Job, around: LaunchContext) -> tuple[str, ...] | None:
    """Return the device nodes of the job's GPUs; None if there are none, or not all known."""
    readings = around.readings()
    found = [readings.get(lease.gpu) for lease in job.leases]
    nodes = [_nodes_of(reading) for reading in found]
    known = [node for each in nodes for node in each or ()]
    return tuple(known) if known and all(each is not None for each in nodes) else None


def environment_of(
    job: Job,
    invocation: Invocation,
    around: LaunchContext,
    limits: Mapping[str, int] = _NO_LIMITS,
    alone: bool = False,
) -> dict[str, str]:
    """Return the variables of `invocation` as they are under the leases of `job`.

    `limits` are the bytes to which the driver keeps it, by GPU; `alone`: it can open no other.
    """
    readings = around.readings()
    return worker_environment(
        invocation.environment,
        job=str(job.id),
        marker=marker_of(job.id, around),
        gpus=[_leased(lease, readings.get(lease.gpu), limits) for lease in job.leases],
        simulated=around.simulated,
        driver=around.driver(),
        hooks=around.hooks,
        options=_options(invocation.options),
        beside=_beside(job, around),
        daemon=around.socket,
        alone=alone,
    )


def _beside(job: Job, around: LaunchContext) -> OverheadOf:
    """Return what tells how much a framework takes beside its pool, for who owns `job`."""
    gpus, driver = len(job.leases), around.driver()

    def beside(framework: str, gpu: LeasedGpu) -> int:
        start = default_overhead(framework, gpus, gpu.name, driver)
        kind = OverheadKey(framework, gpu.name, driver or "", gpus)
        return around.beside(job.owner.uid, kind, start)

    return beside


def marker_of(job: JobId, around: LaunchContext) -> str:
    """Return what the processes of a job are recognised by."""
    return f"{around.installation}/{job}"


def grace_of(job: Job, around: LaunchContext) -> timedelta:
    """Return how long the worker has between being asked to go and being made to."""
    return around.grace if job.grace is None else job.grace


def _nodes_of(reading: GpuReading | None) -> tuple[str, ...] | None:
    """Return the device nodes that a program opens for one GPU; None where that is not known."""
    if reading is None or reading.minor is None:
        return None
    beside = () if reading.parent is None else reading.device_nodes
    return None if beside is None else (f"/dev/nvidia{reading.minor}", *beside)


def _leased(lease: Lease, reading: GpuReading | None, limits: Mapping[str, int]) -> LeasedGpu:
    """Return the lease as the worker's side wants it; a GPU just lost is as large as its lease.

    With a limit of the driver's, which may be a little below the lease, it is as large as that.
    """
    memory = min(lease.memory, limits.get(lease.gpu, lease.memory))
    index, name, total = 0, "unknown", None
    if reading is not None:
        index, name, total = reading.index, reading.name, reading.total
    total = memory if lease.gpu in limits else total or memory
    return LeasedGpu(lease.gpu, index, name, memory, total)


def _terminal(invocation: Invocation) -> TerminalSpec | None:
    wanted = invocation.terminal
    if wanted is None:
        return None
    return TerminalSpec(wanted.rows, wanted.columns, wanted.attributes, wanted.stderr)


def _early_signal(invocation: Invocation) -> EarlySignalSpec | None:
    wanted = invocation.early_signal
    return None if wanted is None else EarlySignalSpec(wanted.signal, wanted.before.total_seconds())


def _options(given: Mapping[str, Any]) -> WorkerOptions:
    """Return the options as the worker's side names them; they were checked when submitted."""
    renamed = {"inter_op_threads": "inter_op", "intra_op_threads": "intra_op"}
    return WorkerOptions(**{renamed.get(name, name): value for name, value in given.items()})
