"""What the daemon answers about the machine: its GPUs, what holds jobs to leases, itself.

A field that came later than the first release has a value for a daemon that does not send it.
"""

from dataclasses import dataclass, field
from typing import Literal

from gpulease.wire.views import JobView

GpuState = Literal["available", "drained", "divided", "prohibited", "unreadable", "lost"]
CheckState = Literal["ok", "warning", "failure"]


@dataclass(slots=True)
class MemoryView:
    """The ledger of one GPU, in bytes; null where the driver does not say."""

    total: int | None
    used: int | None
    reserved: int | None
    allocatable: int | None
    leased: int
    committed: int
    unmanaged: int | None
    headroom: int | None
    """What can be leased now; 0 of a drained or prohibited one."""


@dataclass(slots=True)
class ProcessView:
    """One process on a GPU; it is unmanaged if `job` is null or has no lease on that GPU."""

    pid: int
    user: str | None
    name: str | None
    command: str | None
    memory: int | None
    job: int | None
    serves: bool = False
    """It is an MPS server: what it holds may be that of the jobs on this GPU."""
    started_at: str | None = None
    container: str | None = None
    """The first digits of the id of the container that it is in."""


@dataclass(slots=True)
class GpuEventView:
    """One entry in the history of a GPU's health: "xid 79", "lost", "faulty", "drained" ..."""

    at: str
    """When it was last seen, if more than once."""
    kind: str
    detail: str
    count: int


@dataclass(slots=True)
class GpuView:
    """One GPU and what is on it."""

    index: int
    uuid: str
    name: str
    state: GpuState
    detail: str | None
    memory: MemoryView
    utilization: int | None
    temperature: int | None
    processes: list[ProcessView]
    kept_for: int | None = None
    """The waiting job that is to have it first; what is free is free for that one alone."""
    events: list[GpuEventView] = field(default_factory=list)
    """What happened to its health in the last day, oldest first."""
    label: str = ""
    """The index as people say it, 0, or 0:1 for a MIG device; empty from an older daemon."""
    parent: str | None = None
    """Of a MIG device: the UUID of the GPU that it is a part of."""
    compute_mode: str | None = None
    """default, exclusive process or prohibited; null while it is not known."""


@dataclass(slots=True)
class StandingView:
    """Whether a GPU takes new leases, after somebody drained or resumed it."""

    gpu: str
    label: str
    """Its index, and of a MIG device its place on that GPU: 0, 0:1."""
    drained: str | None
    """Why nothing more is granted there, as a sentence; null where something may be."""
    changed: bool
    """Whether this request made it so."""
    jobs: list[int]
    """The jobs that hold a lease on it, and go on."""


@dataclass(slots=True)
class RungView:
    """One of the things that can hold jobs to their leases, and whether it does on this machine."""

    rung: str
    available: bool
    why: str
    """What it does here, or why it is not to be had."""
    varies: bool = False
    """Whether a table in the settings has it otherwise for a user or a group."""


@dataclass(slots=True)
class StatusView:
    """One look at the whole machine; `jobs` are those that wait or hold a GPU."""

    host: str
    driver: str | None
    version: str
    simulated: bool
    at: str
    gpus: list[GpuView]
    jobs: list[JobView]
    enforcement: list[RungView] = field(default_factory=list)


@dataclass(slots=True)
class CheckView:
    """One thing that `doctor` looked at, and its mend where something is wrong."""

    name: str
    state: CheckState
    message: str
    mend: str | None = None


@dataclass(slots=True)
class OveruseView:
    """What becomes of the caller's own jobs that hold more than their lease."""

    stops: bool
    """Whether they are stopped, or told only."""
    tolerance: int
    """Bytes over the lease, on each GPU, that are let be."""
    grace: float
    """Seconds for which a job may be over by more than that."""
    elastic: bool
    """Whether a job may be over while nobody waits for the memory."""


@dataclass(slots=True)
class DoctorView:
    """What the daemon found out about this machine and itself."""

    checks: list[CheckView]
    overuse: OveruseView | None = None
