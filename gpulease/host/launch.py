"""Turn a granted job into a launch: its lease and invocation become environment and settings."""

import mmap
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gpulease.domain.array_values import command_of_element, values_of
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.host_share import HostShare, host_share
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import Lease
from gpulease.domain.memory_estimate import OverheadKey
from gpulease.host.processes import marker
from gpulease.host.scopes import Scope
from gpulease.shim.launch_request import EarlySignalSpec, IdentitySpec, ShimSpec, TerminalSpec
from gpulease.worker.container_command import starts_container, with_lease
from gpulease.worker.environment import LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import default_overhead

_ARRAY_VARIABLES: Final = ("GPULEASE_ARRAY_JOB", "GPULEASE_ARRAY_INDEX")
_NO_LIMITS: Final[Mapping[GpuUuid, int]] = MappingProxyType({})
_AFTER_THE_GRACE: Final = timedelta(seconds=10)
"""Time for the shim to write its record and to pass on the last output."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The sandbox of a job."""

    scope: Scope
    memory: Mapping[GpuUuid, int]
    """Leased bytes."""
    environment: Callable[[Mapping[GpuUuid, int], bool], Mapping[str, str]]
    """Returns the environment of the job, given the driver's limits in bytes, and whether the job
    can open its own GPUs only."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to launch a worker."""

    shim: ShimSpec
    invocation: Invocation
    """With the complete environment."""
    sandbox: SandboxSpec | None = None
    """None: a program of the daemon, or of a user's own daemon without a lease of RAM."""
    notice: str = ""
    """A line for the owner in the job's output."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a launch needs from the daemon and the machine."""

    installation: str
    """Identifies the processes of this daemon; another daemon on this machine has another."""
    secret: str
    """What the markers of its jobs are made with."""
    as_other_users: bool
    """The daemon is root, and starts jobs as the users that submitted them."""
    simulated: bool
    driver: Callable[[], str | None]
    readings: Callable[[], Mapping[GpuUuid, GpuReading]]
    hooks: Path
    grace: timedelta
    log_limit: int
    keep_free: int = 0
    """Bytes of the disk that logs leave free."""
    levels: Callable[[], tuple[str, ...]] = tuple
    """The enforcement levels of every lease, see EnforcementLevel."""
    remove_limits: Callable[[Job], Awaitable[None]] | None = None
    """Removes the driver's limits of a job that has ended."""
    socket: str = ""
    """The socket on which hooks in jobs report to the daemon."""
    overhead: Callable[[int, OverheadKey, int], int] = lambda uid, key, default: default
    """Returns the measured overhead of a framework in the jobs of a user, or the default."""
    needs_sandbox: Callable[[Job], bool] = lambda job: True
    """Returns whether a job waits for its sandbox before it starts."""
    ram_grace_s: Callable[[Job], float | None] = lambda job: None
    """Returns the seconds for which a job may use more RAM than it leases; None: it is warned."""
    holding: Callable[[], Iterable[Job]] = tuple
    """Returns the jobs that hold memory."""
    ledger: Callable[[Job], str] = lambda job: ""
    """Returns the path of the file by which the processes of a job share its lease."""


def launch_of(
    job: Job,
    invocation: Invocation,
    directory: Path,
    context: LaunchContext,
    cores: tuple[int, ...] = (),
) -> Launch:
    """Return how to start the worker of `job`, on these `cores` of its own if there are any.

    Raises:
        ValueError: the lease cannot be expressed in the environment.
    """
    invocation = _as_element(job, invocation)
    owner = job.owner
    identity = IdentitySpec(owner.uid, owner.gid, owner.user, invocation.groups)
    terminal, early, limit = invocation.terminal, invocation.early_signal, job.claim.time_limit
    grace = grace_of(job, context)
    argv, notice = command_of(job, invocation, context)
    # A user may ask for an hour, but a shutdown must not take that long.
    at_shutdown = min(grace, context.grace) + _AFTER_THE_GRACE
    user = owner.user if context.as_other_users else "root"
    return Launch(
        ShimSpec(
            job=job.id,
            directory=str(directory),
            identity=identity if context.as_other_users else None,
            stdin=invocation.attached,
            awaits_attach=invocation.attached,
            time_limit_s=None if limit is None else limit.total_seconds(),
            grace_s=grace.total_seconds(),
            log_limit=context.log_limit,
            keep_free=context.keep_free,
            terminal=TerminalSpec(
                terminal.rows, terminal.columns, terminal.attributes, terminal.stderr
            )
            if terminal is not None
            else None,
            early_signal=EarlySignalSpec(early.signal, early.before.total_seconds())
            if early is not None
            else None,
            ends_with_client=invocation.ends_with_client,
            cores=cores,
            ram=job.claim.ram,
            ram_grace_s=context.ram_grace_s(job),
        ),
        replace(invocation, argv=argv, environment=environment_of(job, invocation, context)),
        None
        if not context.needs_sandbox(job)
        else SandboxSpec(
            Scope(
                job.id,
                user,
                at_shutdown,
                _nodes(job, context),
                ram=job.claim.ram,
                cores=cores,
                share=_share_of(job, context),
            ),
            {lease.gpu: lease.most for lease in job.leases},
            partial(environment_of, job, invocation, context),
        ),
        notice,
    )


def _share_of(job: Job, context: LaunchContext) -> HostShare:
    """Return what a job gets of CPUs and RAM when the machine is full."""
    readings = context.readings()
    sizes = ((each, readings.get(each.gpu)) for each in job.leases)
    parts = (
        1.0 if reading is None or not reading.total else min(1.0, lease.memory / reading.total)
        for lease, reading in sizes
    )
    gpus = sum(not each.mig_mode for each in readings.values())
    machine = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return host_share(parts, gpus, machine, (job.claim.cpus, job.claim.ram))


def _as_element(job: Job, invocation: Invocation) -> Invocation:
    """Return an invocation with what tells an element of an array apart; another as it is."""
    array, grid = job.queue.array, invocation.grid
    if array is None:
        return invocation
    argv = command_of_element(invocation.argv, grid, array.index)
    values = values_of(grid, array.index)
    return replace(
        invocation,
        argv=argv,
        environment={**invocation.environment, **values},
    )


def command_of(
    job: Job, invocation: Invocation, context: LaunchContext
) -> tuple[tuple[str, ...], str]:
    """Return the command of `invocation`, and a line about it for the owner.

    A command that starts a container passes the lease to it.
    """
    if not starts_container(invocation.argv):
        return invocation.argv, ""
    alone = replace(invocation, environment={})
    return with_lease(
        invocation.argv,
        gpus=() if context.simulated else [lease.gpu for lease in job.leases],
        variables=environment_of(job, alone, context).keys(),
        hooks=context.hooks,
        ledger=context.ledger(job),
    )


def _nodes(job: Job, context: LaunchContext) -> tuple[str, ...] | None:
    """Return the device nodes that a program opens for the job's GPUs.

    None if there are none or not all are known.
    """
    readings = context.readings()
    nodes: list[str] = []
    for lease in job.leases:
        reading = readings.get(lease.gpu)
        if reading is None or reading.minor is None:
            return None
        mig_nodes = () if reading.parent is None else reading.device_nodes
        if mig_nodes is None:
            return None
        nodes += [f"/dev/nvidia{reading.minor}", *mig_nodes]
    return tuple(nodes) or None


def environment_of(
    job: Job,
    invocation: Invocation,
    context: LaunchContext,
    limits: Mapping[GpuUuid, int] = _NO_LIMITS,
    exclusive: bool = False,
    whole: Job | None = None,
) -> dict[str, str]:
    """Return the environment of `invocation` under the leases of `job`.

    `limits` are the driver's limits in bytes. `exclusive` means that the job can open no other GPU.
    `whole` is the job with all its leases, if `job` has a part of them.
    """
    readings, driver = context.readings(), context.driver()
    shared = {lease.gpu: (place, lease) for place, lease in enumerate((whole or job).leases)}
    # They were checked at submission.
    given: dict[str, Any] = dict(invocation.options)

    def overhead(framework: str, gpu: LeasedGpu) -> int:
        count = len(job.leases)
        default = default_overhead(framework, count, gpu.name, driver)
        key = OverheadKey(framework, gpu.name, driver or "", count)
        return context.overhead(job.owner.uid, key, default)

    return worker_environment(
        _with_array(invocation.environment, job),
        job=str(job.id),
        marker=marker_of(job.id, context),
        gpus=[
            _leased(lease, readings.get(lease.gpu), limits, *shared[lease.gpu])
            for lease in job.leases
        ],
        simulated=context.simulated,
        driver=driver,
        hooks=context.hooks,
        options=WorkerOptions(**given),
        overhead_of=overhead,
        daemon=context.socket,
        # A container has no other GPU either.
        alone=exclusive or starts_container(invocation.argv),
        cpus=job.claim.cpus,
        ledger=context.ledger(job),
    )


def _with_array(environment: Mapping[str, str], job: Job) -> Mapping[str, str]:
    """Return an environment with the place of `job` in its array."""
    if job.holder is not None:
        return environment
    # A job that an element submits inherits its variables, and is in no array itself.
    others = {name: each for name, each in environment.items() if name not in _ARRAY_VARIABLES}
    array = job.queue.array
    if array is not None:
        others |= zip(_ARRAY_VARIABLES, (str(array.job), str(array.index)), strict=True)
    return others


def marker_of(job: JobId, context: LaunchContext) -> str:
    """Return the environment variable's value that marks the processes of a job."""
    return marker(context.installation, job, context.secret)


def grace_of(job: Job, context: LaunchContext) -> timedelta:
    """Return the time between SIGTERM and SIGKILL for the worker."""
    return context.grace if job.grace is None else job.grace


def _leased(
    lease: Lease,
    reading: GpuReading | None,
    limits: Mapping[GpuUuid, int],
    place: int,
    whole: Lease,
) -> LeasedGpu:
    """Return the lease for the environment of the worker.

    A GPU without a reading has the size of the lease. With a limit of the driver, which may be
    slightly below the lease, the GPU has the size of the limit.
    """
    memory = min(lease.most, limits.get(lease.gpu, lease.most))
    shared = min(whole.most, limits.get(lease.gpu, whole.most))
    index, name, total = 0, "unknown", None
    if reading is not None:
        index, name, total = reading.index, reading.name, reading.total
    total = memory if lease.gpu in limits else total or memory
    guaranteed = min(lease.memory, memory)
    return LeasedGpu(lease.gpu, index, name, memory, total, place, shared, guaranteed)
