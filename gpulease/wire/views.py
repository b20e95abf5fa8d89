"""What the daemon answers about jobs and their use, and about what went wrong.

A field that came later than the first release has a value for a daemon that does not send it.

What the daemon answers about the machine: its GPUs, what holds jobs to leases, itself.

A field that came later than the first release has a value for a daemon that does not send it.
"""

from dataclasses import dataclass, field
from typing import Literal

JobState = Literal["queued", "granted", "active", "releasing", "ended"]
Outcome = Literal[
    "exited",
    "signaled",
    "released",
    "cancelled",
    "time_limit",
    "over_lease",
    "idle",
    "gave_up",
    "launch_failed",
    "lost",
]
JobKind = Literal["run", "hold"]


@dataclass(slots=True)
class ErrorBody:
    """What went wrong: a stable word, a sentence, and mostly a hint."""

    code: str
    message: str
    hint: str | None = None


@dataclass(slots=True)
class ErrorReply:
    """The body of every response that is not a success."""

    error: ErrorBody


@dataclass(slots=True)
class EnvironmentView:
    """What a lease changes in the environment of its holder; one character per byte."""

    set: dict[str, str]
    unset: list[str]


@dataclass(slots=True)
class ClaimView:
    """What a job asked for. `memory` is bytes on each GPU; null for a share until it is granted."""

    memory: int | None
    share: float | None
    gpus: int
    exclusive: bool
    time_limit: float | None


@dataclass(slots=True)
class PoolView:
    """What a framework in a job says of its pool on one GPU, and what was seen beside it."""

    framework: str
    version: str
    limit: int | None
    """Bytes that the pool may have."""
    peak: int | None
    """The most of it that was needed."""
    charged: int | None
    """What of the lease is kept free beside the pool."""
    beside: int | None
    """What was seen there: what the driver says that the process holds, less its pool."""


@dataclass(slots=True)
class LeaseView:
    """One GPU's part of what a job holds, or held."""

    gpu: str
    memory: int
    used: int | None
    peak: int | None
    enforced_by: list[str]
    """Of driver, framework, watch and devices those that hold the job to it."""
    needed: int | None = None
    """Of an ended one, its peak less what a framework took in advance and never filled."""
    pools: list[PoolView] = field(default_factory=list)
    driver_limit: int | None = None
    """The bytes to which the driver keeps the job, as it says; null where it keeps none."""
    over_since_at: str | None = None
    """Since when more was seen in use than was leased and is let be."""
    stops_at: str | None = None
    """When the job is stopped for it, if that goes on."""


@dataclass(slots=True)
class UnheldView:
    """A process of a job that uses a GPU and that the framework hook does not hold."""

    pid: int
    command: str
    why: str


@dataclass(slots=True)
class RefusalView:
    """Why one GPU cannot take a waiting job now."""

    gpu: str
    index: int
    why: str
    label: str = ""
    """The index as people say it, 0, or 0:1 for a MIG device; empty from an older daemon."""


@dataclass(slots=True)
class EventView:
    """One entry of a job's history."""

    at: str
    kind: str
    detail: str | None


@dataclass(slots=True)
class JobView:
    """All that is shown of a job."""

    id: int
    name: str
    user: str
    state: JobState
    reason: str | None
    """Why it waits or why it ended, as a sentence."""
    outcome: Outcome | None
    position: int | None
    """1 is next; null unless queued."""
    expected_start_at: str | None
    command: str
    claim: ClaimView
    leases: list[LeaseView]
    submitted_at: str
    granted_at: str | None
    started_at: str | None
    ended_at: str | None
    expires_at: str | None
    exit_status: int | None
    """As a shell shows it: the job's own, 128 + signal, or 124 where a limit ended it: its time,
    its lease, or how long it may be idle."""
    pid: int | None
    directory: str | None
    """Where the job's own socket is, once it has been launched."""
    cwd: str | None = None
    """Where the command runs, for who may see it; null of an ended job and in lists."""
    hint: str | None = None
    """What to do about `reason`, where something can be done."""
    kind: JobKind = "run"
    terminal: bool = False
    """Whether it runs on a pseudo-terminal."""
    main_exited_at: str | None = None
    """When the main process ended, while others of the job keep its leases."""
    suspended: bool = False
    """Its main process, or the process that holds the lease, is stopped by a signal, as by Ctrl-Z;
    the lease is kept."""
    processes: int | None = None
    """How many processes it has; null where nobody counted."""
    grace: float | None = None
    """Seconds between SIGTERM and SIGKILL; null for a hold, which is ended by neither."""
    gives_up_at: str | None = None
    """Until when it is willing to wait; null once it does not wait, or if it waits without end."""
    kept_until_at: str | None = None
    """Until when nobody minds that nothing happens under its lease."""
    idle_since_at: str | None = None
    """Since when nothing was seen to happen under its lease, where that has consequences."""
    idle_ends_at: str | None = None
    """When the lease is taken back for it, if that goes on."""
    refusals: list[RefusalView] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)
    unheld: list[UnheldView] = field(default_factory=list)
    sized: str | None = None
    """Why it leases as much as it does, where nobody said how much."""
    out_of_memory: bool = False
    """It ended because the GPU memory of its lease did not do."""
    retry_of: int | None = None
    """The job that ran out of memory and that this one tries again."""
    retried_as: int | None = None
    """The job that tries this one again."""
    events: list[EventView] = field(default_factory=list)


@dataclass(slots=True)
class NestedView:
    """The job under whose lease the process that asks runs, and its part of that lease."""

    job: JobView | None
    """Null: it runs under none, and there is no part."""
    gpus: list[str] = field(default_factory=list)
    memory: int | None = None
    """Bytes on each of `gpus`."""
    environment: EnvironmentView | None = None
    """What puts the part into force."""


@dataclass(slots=True)
class JobList:
    """The jobs of a listing, oldest first."""

    jobs: list[JobView]


@dataclass(slots=True)
class UseView:
    """What the ended jobs of one user asked for and used, as far as the use is known."""

    user: str
    jobs: int
    out_of_memory: int
    """How many of them ended for want of GPU memory."""
    gpu_seconds: float
    asked: float
    """Bytes leased, times the seconds for which they were."""
    used: float
    """The same of the most that they needed."""


@dataclass(slots=True)
class ReportView:
    """Asked against used, by user; `since` is when the jobs ended at the earliest."""

    since: str | None
    users: list[UseView]


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
class GpuAvailabilityView:
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
class EnforcementLevelView:
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
    enforcement: list[EnforcementLevelView] = field(default_factory=list)


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
