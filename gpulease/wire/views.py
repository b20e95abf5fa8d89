"""The shapes of the daemon's answers: jobs, the machine, reports and errors.

A field that was added later has a default, for an older daemon that does not send it.
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
    "preempted",
    "requeued",
    "dependency_failed",
    "launch_failed",
    "lost",
]
JobKind = Literal["run", "hold"]


@dataclass(slots=True)
class ErrorBody:
    """What went wrong: a stable code for programs, a message, and a hint if there is one."""

    code: str
    message: str
    hint: str | None = None


@dataclass(slots=True)
class ErrorReply:
    """The body of every response that is not a success (2xx)."""

    error: ErrorBody


@dataclass(slots=True)
class EnvironmentView:
    """What a lease changes in the environment of its holder; one character per byte."""

    set: dict[str, str]
    unset: list[str]


@dataclass(slots=True)
class ClaimView:
    """What a job asked for: bytes on each GPU, or a share of it in percent."""

    memory: int | None
    share: float | None
    gpus: int
    exclusive: bool
    time_limit: float | None
    named: list[str] = field(default_factory=list)
    """The UUIDs of the GPUs that it was asked for; empty for any."""
    named_labels: list[str] = field(default_factory=list)
    """These GPUs as people know them, such as 0 or 0:1."""
    model: str | None = None
    min_vram: int | None = None
    same_model: bool = False


@dataclass(slots=True)
class PoolView:
    """The memory pool of a framework on one GPU, as it reports, and the memory outside it."""

    framework: str
    version: str
    limit: int | None
    """Bytes that the pool may reach."""
    peak: int | None
    """The most bytes of it that were in use."""
    charged: int | None
    """Bytes of the lease that are reserved for memory outside the pool."""
    beside: int | None
    """Bytes in use outside the pool: what the driver counts for the process, minus the pool."""


@dataclass(slots=True)
class LeaseView:
    """The lease of a job on one GPU."""

    gpu: str
    memory: int
    used: int | None
    peak: int | None
    enforced_by: list[str]
    """The enforcement levels that apply: driver, framework, watch, devices."""
    needed: int | None = None
    """After the end: the peak, minus what a framework allocated in advance and never used."""
    pools: list[PoolView] = field(default_factory=list)
    driver_limit: int | None = None
    """The limit that the driver reports for the job, in bytes; null if it has none."""
    over_since_at: str | None = None
    """Since when the use exceeds the lease by more than the tolerance."""
    stops_at: str | None = None
    """When the job is stopped for it, if the use stays as high."""


@dataclass(slots=True)
class UnheldView:
    """A process of a job that uses a GPU without the framework hook."""

    pid: int
    command: str
    why: str


@dataclass(slots=True)
class DeviceView:
    """A GPU of a job, and the names that frameworks give it."""

    gpu: str
    names: list[str]
    """TensorFlow's and PyTorch's: /GPU:0, cuda:0."""
    name: str
    """Its model."""
    bus: str | None
    """Its PCI address: 0000:3b:00.0."""
    simulated: bool = False
    """A CPU device stands in for it."""


@dataclass(slots=True)
class HookLimitView:
    """The limit of the pool of a framework on one GPU."""

    gpu: str
    limit: int | None
    """Bytes; null for a pool without a size, as on simulated GPUs."""


@dataclass(slots=True)
class HookView:
    """What the hook did about one framework in one process of a job."""

    pid: int
    framework: str
    """Empty if it is unknown, or for all frameworks."""
    version: str
    state: str
    """limited; failed: the hook could not limit it; absent: a process without the hook."""
    why: str | None
    limits: list[HookLimitView]
    at: str


@dataclass(slots=True)
class RefusalView:
    """Why a waiting job does not fit on one GPU now."""

    gpu: str
    index: int
    why: str
    label: str = ""
    """The index as shown to people: 0, or 0:1 for a MIG device; empty from an older daemon."""


@dataclass(slots=True)
class SuggestionView:
    """A change of its options with which a waiting job would start now."""

    options: str
    """As on the command line: --mem 6G."""
    before: int | None = None
    """The job with the reservation that it would start before."""


@dataclass(slots=True)
class EventView:
    """One entry in the history of a job."""

    at: str
    kind: str
    detail: str | None


@dataclass(slots=True)
class QueueView:
    """What was asked of the queue for a job."""

    priority: str
    nice: int
    held: bool
    begin_at: str | None
    after: list[str]
    """The jobs that it still waits for, such as "17:ok"."""
    requeue: bool
    preemptible: bool
    array: int | None
    """The id of its array, which is the id of the first element."""
    array_index: int | None
    array_most: int | None
    """How many elements of the array may run at once."""
    requeued: int
    """How often it was queued again."""
    blocked_by: str | None = None
    """Why it may not start now, apart from memory: held, begin, after, array; null if it may."""


@dataclass(slots=True)
class JobView:
    """A job."""

    id: int
    name: str
    user: str
    state: JobState
    reason: str | None
    """Why it waits or why it ended, for people."""
    outcome: Outcome | None
    position: int | None
    """Place in the queue, 1 for the next job; null unless queued."""
    expected_start_at: str | None
    """A prediction: when it starts if jobs run for as long as similar ones did. Null if it does not
    wait, or is too far back in a long queue."""
    command: str
    claim: ClaimView
    leases: list[LeaseView]
    submitted_at: str
    granted_at: str | None
    started_at: str | None
    ended_at: str | None
    expires_at: str | None
    exit_status: int | None
    """As a shell shows it: the exit code, 128 + signal, or 124 if a limit ended the job (time,
    lease or idleness)."""
    pid: int | None
    directory: str | None
    """Where the socket of the job is, once it has started."""
    cwd: str | None = None
    """The working directory, for the owner; null after the end and in lists."""
    hint: str | None = None
    """What to do about `reason`."""
    kind: JobKind = "run"
    terminal: bool = False
    """Whether it runs on a pseudo-terminal."""
    main_exited_at: str | None = None
    """When the main process ended, if other processes of the job keep its leases."""
    suspended: bool = False
    """The main process, or the holder of the lease, is stopped, as by Ctrl-Z; the lease stays."""
    processes: int | None = None
    """The number of its processes; null in lists."""
    grace: float | None = None
    """Seconds between SIGTERM and SIGKILL; null for a hold, which gets neither."""
    gives_up_at: str | None = None
    """When it leaves the queue; null if it does not wait, or waits without limit."""
    kept_until_at: str | None = None
    """Until when it may be idle (gpulease keep)."""
    idle_since_at: str | None = None
    """Since when it is idle, if the idle policy applies."""
    idle_ends_at: str | None = None
    """When the lease is taken back, if it stays idle."""
    refusals: list[RefusalView] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)
    """The jobs that have to end, or to start, before memory is free for it."""
    behind: int | None = None
    """The job that memory is reserved for; jobs that would delay it wait."""
    suggestions: list[SuggestionView] = field(default_factory=list)
    """Changes with which it would start now, where one job was asked for; empty in lists."""
    unheld: list[UnheldView] = field(default_factory=list)
    hook: str | None = None
    """What the hooks in its processes did: limited, failed, absent, or none if no framework was
    used yet; null if they limit nothing here, or after the end."""
    hooks: list[HookView] = field(default_factory=list)
    """The same by process and framework, where one job was asked for; empty in lists."""
    devices: list[DeviceView] = field(default_factory=list)
    """Its GPUs, where one job that holds memory was asked for; empty in lists."""
    first_use_at: str | None = None
    """When a framework or the driver first reported its use of a GPU."""
    utilization: int | None = None
    """Percent, the mean over its run and its GPUs, as far as the daemon has seen it."""
    steps: int | None = None
    """Training steps, as a framework counts them."""
    steps_per_second: float | None = None
    sized: str | None = None
    """Where the size of its lease comes from, if the user gave none."""
    out_of_memory: bool = False
    """It ran out of GPU memory."""
    retry_of: int | None = None
    """The job that ran out of memory, of which this is the next attempt."""
    retried_as: int | None = None
    """The next attempt of this job."""
    label: str = ""
    """The id as people see it: 17, or 17_3 for an element of an array; empty from an older
    daemon."""
    queue: QueueView | None = None
    """Null from an older daemon."""
    adopted: bool = False
    """Its process used GPUs before it had the lease: no framework in it is limited."""
    events: list[EventView] = field(default_factory=list)
    """The history, oldest first, where one job was asked for; empty in lists of jobs."""


@dataclass(slots=True)
class ExplainView:
    """What would happen to a job if it were submitted now."""

    starts_now: bool
    gpus: list[str]
    """Where it would start now: the indexes of GPUs as people see them."""
    claim: ClaimView
    sized: str | None
    """Where the size of its lease comes from, if the request names none."""
    runs_for: float
    """A prediction from similar jobs, in seconds, at most its time limit."""
    reason: str | None
    """Why it would wait, for people."""
    position: int | None
    expected_start_at: str | None
    """As in JobView; null if it starts now."""
    refusals: list[RefusalView]
    waits_for: list[int]
    behind: int | None
    suggestions: list[SuggestionView]
    preempts: list[int] = field(default_factory=list)
    """The preemptible jobs that would make way for it at once."""
    begin_at: str | None = None
    """It would not start before, if that alone blocks it."""


@dataclass(slots=True)
class NestedView:
    """The job under whose lease the calling process runs, and a part of that lease."""

    job: JobView | None
    """Null: it runs under none, and the other fields are empty."""
    gpus: list[str] = field(default_factory=list)
    memory: int | None = None
    """Bytes on each of `gpus`."""
    environment: EnvironmentView | None = None
    """The variables that apply the part."""
    argv: list[str] = field(default_factory=list)
    """The command; one that starts a container has options more. One character per byte."""
    notice: str = ""
    """A line about the command; empty for none."""


@dataclass(slots=True)
class JobList:
    """The jobs of a listing, oldest first."""

    jobs: list[JobView]


@dataclass(slots=True)
class PastJobView:
    """A job that has ended."""

    id: int
    label: str
    """The id as people see it: 17, or 17_3 for an element of an array."""
    name: str
    user: str
    kind: JobKind
    outcome: Outcome | None
    exit_status: int | None
    submitted_at: str
    granted_at: str | None
    """Since when it held memory; null if it never did."""
    ended_at: str
    gpus: int
    memory: int | None
    """Bytes on each GPU: leased, or asked for if it never held any."""
    used: int | None
    """The most bytes that it needed on a GPU; null if unknown."""
    utilization: int | None
    """Percent of the time in which its GPUs were busy; null if unknown."""
    time_limit: float | None
    command: str | None
    """Digests of its command: what similar runs have in common, and all arguments. They do not
    reveal it."""


@dataclass(slots=True)
class HistoryView:
    """Ended jobs, the newest first."""

    jobs: list[PastJobView]
    before: int | None = None
    """The jobs with ids below this follow; null if there are none."""


@dataclass(slots=True)
class CancelledView:
    """Jobs that were cancelled together."""

    count: int
    ending: int
    """How many of them still run, and are being stopped."""
    jobs: list[JobView]
    """The first of them."""


@dataclass(slots=True)
class EditedJobView:
    """A job after a request to edit or move it."""

    id: int
    label: str
    name: str
    changes: list[str]
    """What changed, from what to what, for people; empty if it had these values."""


@dataclass(slots=True)
class EditedView:
    """Jobs that were edited or moved together."""

    count: int
    jobs: list[EditedJobView]
    """The first of them."""


@dataclass(slots=True)
class UseView:
    """What the ended jobs of one user asked for and used, where the use is known."""

    user: str
    jobs: int
    out_of_memory: int
    """How many of them ran out of GPU memory."""
    gpu_seconds: float
    asked: float
    """Byte-seconds leased."""
    used: float
    """Byte-seconds of the peaks."""


@dataclass(slots=True)
class PredictionsView:
    """How good predictions were: the medians of their absolute errors, in seconds."""

    starts: int
    """The jobs that waited with an expected start; the first one counts."""
    start_error: float | None
    runs: int
    """The jobs with a predicted run time."""
    run_error: float | None


@dataclass(slots=True)
class ShareView:
    """What one user has used, holds and waits for, and whose turn that makes it."""

    user: str
    use: float
    """Byte-seconds leased; earlier use counts less."""
    share: float
    """The part of all use that counts for the order, 0 to 1."""
    factor: float
    """What the cost of the user's jobs is multiplied by; 1 for an equal share."""
    held: int
    """Bytes leased now."""
    running: int
    waiting: int
    turn: int | None
    """The place of the user's next job among those of all users; null: none can start."""
    next_job: str | None
    """The label of that job."""
    started: int = 0
    """The jobs that got memory since `SharesView.since`."""
    mean_wait: float | None = None
    """Seconds that those had waited; null if there are none."""
    longest_wait: float | None = None


@dataclass(slots=True)
class SharesView:
    """The users with recent use or jobs, those with a turn first."""

    policy: str
    half_life: float
    """Seconds after which use counts half."""
    since: str
    """The beginning of the time that the waits are from."""
    users: list[ShareView]


@dataclass(slots=True)
class ReportView:
    """Asked and used, by user, of the jobs that ended after `since`."""

    since: str | None
    users: list[UseView]
    predictions: PredictionsView | None = None
    """Null from an older daemon."""


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
    events: list[GpuEventView] = field(default_factory=list)
    """Health events of the last day, oldest first."""
    label: str = ""
    """The index as shown to people: 0, or 0:1 for a MIG device; empty from an older daemon."""
    parent: str | None = None
    """Of a MIG device: the UUID of its GPU."""
    compute_mode: str | None = None
    """default, exclusive process or prohibited; null if unknown."""


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
class StatusView:
    """The machine, and the jobs that wait or hold memory."""

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
