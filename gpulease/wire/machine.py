"""The shapes of the daemon's answers about the machine: GPUs, pauses, windows, and checks.

A field that was added later has a default, for an older daemon that does not send it.
"""

from dataclasses import dataclass, field
from typing import Literal

from gpulease.wire.jobs import JobView

FIRST_IN_QUEUE = 20
"""Queued jobs in a status, unless the request names another number."""

GpuState = Literal["available", "drained", "divided", "prohibited", "unreadable", "lost"]

CheckState = Literal["ok", "warning", "failure"]


@dataclass(slots=True)
class MemoryView:
    """The memory of one GPU, in bytes; null if unknown."""

    total: int | None
    used: int | None
    reserved: int | None
    allocatable: int | None
    leased: int
    committed: int
    unmanaged: int | None
    headroom: int | None
    """What can be leased now; 0 on a drained or prohibited GPU."""


@dataclass(slots=True)
class ProcessView:
    """A process on a GPU. It is unmanaged if `job` is null or has no lease on that GPU."""

    pid: int
    user: str | None
    name: str | None
    command: str | None
    memory: int | None
    job: int | None
    serves: bool = False
    """It is an MPS server: its memory may belong to the jobs on this GPU."""
    started_at: str | None = None
    container: str | None = None
    """The first digits of the id of its container."""
    utilization: int | None = None
    """Percent of the GPU; null if unknown, and from an older daemon."""


@dataclass(slots=True)
class NeighbourView:
    """What the personal daemon of another user leases of a GPU, in bytes."""

    user: str
    leased: int
    unused: int
    """What none of its processes uses yet; nothing of this can be leased here."""


@dataclass(slots=True)
class GpuEventView:
    """One entry in the health history of a GPU: "xid 79", "lost", "faulty", "drained" ..."""

    at: str
    """The last time, if it happened more than once."""
    kind: str
    detail: str
    count: int


@dataclass(slots=True)
class GpuView:
    """A GPU and the processes on it."""

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
    """The waiting job for which it is reserved; no later job gets its free memory."""
    kept_for_label: str | None = None
    """Its id as people see it."""
    events: list[GpuEventView] = field(default_factory=list)
    """Health events of the last day, oldest first."""
    label: str = ""
    """The index as shown to people: 0, or 0:1 for a MIG device; empty from an older daemon."""
    parent: str | None = None
    """Of a MIG device: the UUID of its GPU."""
    compute_mode: str | None = None
    """default, exclusive process or prohibited; null if unknown."""
    slurm: bool = False
    """Slurm assigns it to its jobs."""
    power: float | None = None
    """Watts; null if unknown, for a MIG device, and from an older daemon."""
    power_limit: float | None = None
    """Watts above which it slows down."""
    neighbours: list[NeighbourView] = field(default_factory=list)
    """What daemons of other users lease of it, where no daemon of root's does."""


@dataclass(slots=True)
class LinkView:
    """How a GPU reaches another one."""

    gpu: str
    """The UUID of the other one."""
    nvlinks: int
    """Between the two, or of each of them to the switch between them."""
    path: str | None
    """Through PCI Express: PIX, PXB, PHB, NODE or SYS, as nvidia-smi topo says; null: unknown."""


@dataclass(slots=True)
class GpuTopologyView:
    """Where a GPU is in the machine."""

    uuid: str
    label: str
    """The index as shown to people."""
    name: str
    numa_node: int | None
    """Null if unknown, as are the processors."""
    cpus: str | None
    """The processors of its socket: 0-15,32-47."""
    links: list[LinkView]
    """To other GPUs, as far as the driver reports them."""


@dataclass(slots=True)
class TopologyView:
    """The GPUs of the machine and the links between them."""

    gpus: list[GpuTopologyView]


@dataclass(slots=True)
class GpuAvailabilityView:
    """Whether leases are granted on a GPU, after a request to drain or resume it."""

    gpu: str
    label: str
    """The index as shown to people: 0, or 0:1 for a MIG device."""
    drained: str | None
    """Why no leases are granted; null if they are."""
    changed: bool
    """Whether this request changed it."""
    jobs: list[int]
    """The jobs with a lease on it, which continue."""


@dataclass(slots=True)
class EnforcementLevelView:
    """A level of enforcement, and whether it applies on this machine."""

    rung: str
    available: bool
    why: str
    """What it does here, or why it is not available."""
    varies: bool = False
    """Whether the settings make an exception for a user or a group."""


@dataclass(slots=True)
class PauseView:
    """A pause of the queue by an admin: no job starts, and running jobs continue."""

    by: str
    why: str
    """Empty if no reason was given."""
    at: str
    """Since when."""


@dataclass(slots=True)
class PauseChangeView:
    """The pause of the queue after a request to pause it or to end the pause."""

    paused: PauseView | None
    """Null: jobs start."""
    changed: bool
    """Whether this request changed it."""


@dataclass(slots=True)
class WindowView:
    """GPUs that an admin set apart for a time."""

    id: int
    name: str
    users: list[str]
    groups: list[str]
    gpus: int
    """How many."""
    on: list[str]
    """The UUIDs of its GPUs. Until it begins, those of a window that names none may change."""
    labels: list[str]
    """The same GPUs as shown to people: 0, or 0:1 for a MIG device."""
    named: bool
    """Whether it names its GPUs."""
    is_on: bool
    begins_at: str
    """Of the current or next time."""
    ends_at: str
    lasts_for: float
    """Seconds."""
    cron: str | None
    """When it recurs, as five fields of crontab(5); null for once."""
    created_by: str
    created_at: str
    lifts_limits: bool
    """While it is on, limits do not keep jobs of its users waiting."""
    other_jobs: list[int] = field(default_factory=list)
    """While it is on: jobs of other users that still run on its GPUs."""


@dataclass(slots=True)
class WindowList:
    """The windows, those that are on or begin soon first."""

    windows: list[WindowView]


@dataclass(slots=True)
class UserWaitingView:
    """How many jobs of a user are queued."""

    user: str
    jobs: int


@dataclass(slots=True)
class ResourcesView:
    """The RAM of the machine in bytes, and its cores. Null is unknown."""

    ram: int | None
    """All that can be leased: the total less the reserve."""
    ram_leased: int
    ram_used_by_others: int | None
    """By everything without a lease of RAM."""
    ram_free: int | None
    """What a job can lease now."""
    cores: int
    cores_leased: int
    cores_free: int


@dataclass(slots=True)
class StatusView:
    """The machine, the jobs that hold memory, and after them the first jobs of the queue."""

    host: str
    driver: str | None
    version: str
    simulated: bool
    at: str
    gpus: list[GpuView]
    jobs: list[JobView]
    enforcement: list[EnforcementLevelView] = field(default_factory=list)
    paused: PauseView | None = None
    """The pause of the queue; null if it is not paused."""
    closed: str | None = None
    """Why no job can start now: the pause, a shutdown, a missing device node; null if jobs can."""
    windows: list[WindowView] = field(default_factory=list)
    waiting: int | None = None
    """The number of queued jobs, of which `jobs` has the first; null from an older daemon, which
    sends all of them."""
    more: str | None = None
    """The command that prints all of them; null if `jobs` has all."""
    waiting_by_user: list[UserWaitingView] = field(default_factory=list)
    """The users with queued jobs; empty from an older daemon."""
    resources: ResourcesView | None = None
    """Null where no job leases RAM or cores and the settings reserve none."""


@dataclass(slots=True)
class CheckView:
    """One check of `doctor`, and the fix where something is wrong."""

    name: str
    state: CheckState
    message: str
    mend: str | None = None


@dataclass(slots=True)
class OveruseView:
    """What happens to the caller's jobs when they exceed their lease."""

    stops: bool
    """Whether they are stopped, or only warned."""
    tolerance: int
    """Bytes above the lease, on each GPU, that are allowed."""
    grace: float
    """Seconds for which a job may exceed that."""
    elastic: bool
    """Whether a job may exceed its lease while no job waits for the memory."""


@dataclass(slots=True)
class DoctorView:
    """The checks of the machine and the daemon."""

    checks: list[CheckView]
    overuse: OveruseView | None = None
    sees_hidden: bool = False
    """Whether the caller sees what other users run although the admin hides it: for admins."""
