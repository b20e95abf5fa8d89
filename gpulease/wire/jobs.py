"""The shapes of the daemon's answers about jobs: their leases, their GPUs, and the queue.

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

JobKind = Literal["run", "hold", "slurm"]


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
    memory_bound: int | None = None
    """Bytes that it may use while no other job needs them; null without a range."""
    share_bound: float | None = None
    """The same as a share of a GPU, in percent."""
    ram: int | None = None
    """Bytes of RAM for all its processes; null without a lease of RAM."""
    cpus: int | None = None
    """CPU cores; null without a lease of cores."""
    linked: bool = False
    """Each two of its GPUs are to be linked by NVLink."""


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
    shared_with: list[str] = field(default_factory=list)
    """The other jobs on the GPU, as people see their ids, if together they keep it so busy that
    each probably runs slower; empty otherwise."""
    memory_bound: int | None = None
    """Bytes that the job may use there while no other job needs them; null without a range."""


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
    index: str | None = None
    """As people see it: 0, or 0:1 of a MIG device; null if it cannot be read now."""


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
    kind: str = ""
    """What is missing: leased, busy, reserved, drained, ...; empty from an older daemon."""


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
class ArrayWaitingView:
    """The queued elements of an array that one of them stands for, itself included."""

    indices: str
    """Such as "0-299"; of many ranges the first, then "..."."""
    jobs: int


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
    array_waiting: ArrayWaitingView | None = None
    """The elements that it stands for in a status that leaves jobs out; null if it stands for
    itself alone."""
    retries: int = 0
    """How often it is tried again if it fails."""
    retried: int = 0
    """How often it was tried again: this is try `retried` + 1."""
    retry_on: list[int] = field(default_factory=list)
    """The exit statuses after which it is tried again; empty: any but 0."""
    retry_delay: float | None = None
    """Seconds before the first retry, doubled at each; null if it is not tried again."""


@dataclass(slots=True)
class ExpectedStartView:
    """When a waiting job probably starts. Instants are in a coarser grain the later they are."""

    from_at: str | None
    until_at: str | None
    """A third of the predicted time from the prediction on, and three times that; null if nothing
    is predicted. A range ends within the hour only if the means of run times say so too."""
    after: int | None
    """The job whose end probably makes room for it; null if it waits for no end."""
    after_label: str | None = None
    """The same as people see it (17_3 for an element of an array), if that differs."""
    after_is_late: bool = False
    """That job has run longer than predicted."""
    is_late: bool = False
    """The job itself should have started by now, as was first predicted."""
    kept_free_from_at: str | None = None
    """From when on memory is kept free for it, if it has not started and no older job is in its
    place; null if that is unknown."""


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
    """A prediction: when it starts if jobs run for the median of what similar ones did. Null if it
    does not wait, or is too far back in a long queue. `expected_start` says how sure that is."""
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
    pids: list[int] | None = None
    """These processes, for those who may see what the job runs; null in lists."""
    nvlinks: int | None = None
    """The NVLinks between those two of its GPUs that have the fewest; null of one GPU, and where
    none of its GPUs has any."""
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
    waits_for_labels: list[str] = field(default_factory=list)
    """`waits_for` as people see it (17_3 for an element of an array), if that differs."""
    behind_label: str | None = None
    """`behind` as people see it."""
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
    ram_peak: int | None = None
    """The most bytes of the machine's RAM that all its processes used together, without files that
    the kernel keeps in memory while there is room. Null if unknown, like the CPU time."""
    cpu_seconds: float | None = None
    """CPU time of all its processes."""
    ram_held_by: str | None = None
    """Of a running job that leases RAM: kernel, or watch where its shim adds up its processes."""
    cores: str | None = None
    """Of a running job that leases cores: the CPUs that it runs on, such as 0-3,8."""
    sized: str | None = None
    """Where the size of its lease comes from, if the user gave none."""
    advised: int | None = None
    """After the end: bytes to ask for next time, if it leased more than it needed."""
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
    slurm_job: int | None = None
    """The job of Slurm that its lease belongs to; null for none."""
    notify: list[str] = field(default_factory=list)
    """The events of which its owner is notified, such as fail or time-left=600 (seconds)."""
    events: list[EventView] = field(default_factory=list)
    """The history, oldest first, where one job was asked for; empty in lists of jobs."""
    expected_start: ExpectedStartView | None = None
    """Null if it does not wait or nothing is known about its start, and from an older daemon."""


@dataclass(slots=True)
class JobRowView:
    """A job in brief: what a line of a listing shows. A field means the same as in JobView."""

    id: int
    label: str
    name: str
    user: str
    kind: JobKind
    slurm_job: int | None
    state: JobState
    suspended: bool
    reason: str | None
    outcome: Outcome | None
    exit_status: int | None
    out_of_memory: bool
    claim: ClaimView
    queue: QueueView | None
    """Null if it is in no array and nothing blocks it."""
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    expected_start_at: str | None
    expected_start: ExpectedStartView | None
    command: str


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
    """Why it would not start now, for people."""
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
    waits_for_labels: list[str] = field(default_factory=list)
    """As in JobView."""
    behind_label: str | None = None
    expected_start: ExpectedStartView | None = None
    never_starts: bool = False
    """A job that it would wait for has ended otherwise than it asks."""


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
    """The command, with the options that a container needs. One character per byte."""
    notice: str = ""
    """A line about the command; empty for none."""


@dataclass(slots=True)
class JobList:
    """The jobs of a listing, oldest first, or one page of them."""

    jobs: list[JobView]
    total: int | None = None
    """The number of jobs on all pages; null from an older daemon."""
    next: int | None = None
    """The job to ask for as `after` for the next page; null on the last one."""


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
