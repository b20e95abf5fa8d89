"""The shapes of requests, and of the answer to one that fails."""

from dataclasses import dataclass, field
from typing import Literal

from gpulease.wire.text import API_PREFIX as API_PREFIX
from gpulease.wire.text import LARGEST_EXEC as LARGEST_EXEC
from gpulease.wire.text import LARGEST_INDEX as LARGEST_INDEX
from gpulease.wire.text import LARGEST_REQUEST as LARGEST_REQUEST
from gpulease.wire.text import LARGEST_RETRY as LARGEST_RETRY
from gpulease.wire.text import LARGEST_STRING as LARGEST_STRING
from gpulease.wire.text import LONGEST_NAME as LONGEST_NAME
from gpulease.wire.text import MOST_DEPENDENCIES as MOST_DEPENDENCIES
from gpulease.wire.text import MOST_ELEMENTS as MOST_ELEMENTS
from gpulease.wire.text import exec_size as exec_size
from gpulease.wire.text import from_wire as from_wire
from gpulease.wire.text import spoken as spoken
from gpulease.wire.text import to_wire as to_wire


@dataclass(slots=True)
class ClaimRequest:
    """What a job asks for: `memory` (bytes) or `share` (percent), or neither for the default."""

    memory: int | None = None
    share: float | None = None
    gpus: int = 1
    exclusive: bool = False
    time_limit: float | None = None
    named: list[str] = field(default_factory=list)
    """The only suitable GPUs, by index, UUID or the beginning of a UUID; empty: any."""
    model: str | None = None
    """Only GPUs with these words in the name, such as "A100"; upper and lower case are the same."""
    min_vram: int | None = None
    """Only GPUs of at least this size, in bytes; up to 8% that the driver keeps may be missing."""
    same_model: bool = False
    """All GPUs of the job have the same name."""
    memory_bound: int | None = None
    """Bytes that the job may use while no other job needs them; `memory` or `share` is guaranteed.
    Null like `share_bound`, in percent: the same as is guaranteed."""
    share_bound: float | None = None
    ram: int | None = None
    """Bytes of the machine's RAM for all processes of the job; null: no lease of RAM."""
    cpus: int | None = None
    """CPU cores of the machine; null: no lease of cores."""
    linked: bool = False
    """Each two GPUs of the job are linked by NVLink."""


@dataclass(slots=True)
class WorkerOptionsRequest:
    """How the frameworks in a job see its GPUs."""

    visible: Literal["uuid", "index"] = "uuid"
    growth: bool = False
    split: int = 1
    inter_op_threads: int | None = None
    intra_op_threads: int | None = None
    log_placement: bool = False
    soft_placement: bool = False
    strict: bool = False
    split_sizes: list[int] = field(default_factory=list)
    """Bytes of each logical GPU on every leased GPU; empty: `split` equal ones."""
    deterministic: bool = False
    """Frameworks use deterministic operations."""
    omp_threads: int | None = None
    processes: int | None = None
    """Divide the memory equally between this many processes; null: see docs/frameworks.md."""


@dataclass(slots=True)
class TerminalRequest:
    """The terminal of the command, which the job gets a copy of."""

    rows: int
    columns: int
    attributes: list[int] | None = None
    """As in termios(3): iflag, oflag, cflag, lflag, ispeed, ospeed, then the control characters;
    null: the system's defaults."""
    stderr: bool = True
    """Whether standard error is the terminal too; otherwise it is a separate stream."""


@dataclass(slots=True)
class EarlySignalRequest:
    """A signal for the main process, `before` seconds before its time limit."""

    signal: int
    before: float


@dataclass(slots=True)
class QueueRequest:
    """When a job may start, and in what order."""

    priority: Literal["low", "normal", "high"] = "normal"
    nice: int = 0
    held: bool = False
    begin_at: str | None = None
    """An instant in ISO 8601."""
    after: list[str] = field(default_factory=list)
    """Jobs that have to end first, such as "17", "17_3:any" or "18:fail"."""
    array: str | None = None
    """The indices of an array of jobs, such as "0-99%8" or "1,3,5"."""
    requeue: bool = False
    preemptible: bool = False
    retries: int = 0
    """How often the job is tried again if it fails by itself."""
    retry_on: list[int] = field(default_factory=list)
    """Only after these exit statuses, as a shell shows them; empty: after any but 0."""
    retry_delay: float | None = None
    """Seconds before the first retry, doubled at each further one up to an hour; null: 10."""


@dataclass(slots=True)
class SubmitRequest:
    """A job to queue. `argv`, `cwd` and `environment` are one character per byte."""

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    umask: int = 0o022
    soft_limits: dict[str, int] = field(default_factory=dict)
    """By names such as "RLIMIT_NOFILE" of the module resource; -1 is unlimited."""
    nice: int = 0
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)
    name: str | None = None
    attached: bool = False
    """A client will attach at once: the output waits for it, and it provides stdin."""
    ends_with_client: bool = False
    """The job ends when the attached client exits or is killed."""
    wait: float | None = None
    """Seconds to wait for a grant; 0: do not wait, null: without limit."""
    terminal: TerminalRequest | None = None
    """The job gets a pseudo-terminal like this one; null: three separate streams."""
    early_signal: EarlySignalRequest | None = None
    grace: float | None = None
    """Seconds between SIGTERM and SIGKILL; null: the default of the daemon."""
    key: str | None = None
    """Identifies this submission: sent again under the same key, after a lost answer, it returns
    the job of the first time and makes no second one."""
    queue: QueueRequest = field(default_factory=QueueRequest)
    retry_oom: float | None = None
    """After an out-of-memory error the job is tried again with its memory times this, above 1."""
    refuse_nested: bool = False
    """Queue nothing if the calling process runs within the lease of a job: the error is then
    within_lease."""
    grid: dict[str, list[str]] = field(default_factory=dict)
    """Values by names, one character per byte: an array with an element for each combination, or
    for those with the indices `queue.array`. In `argv`, `{NAME}` becomes the value."""
    notify: list[str] = field(default_factory=list)
    """The events of which the owner is notified: start, end, fail, oom, over-lease, idle, or
    time-left=S for S seconds before the time limit."""


@dataclass(slots=True)
class HoldRequest:
    """A lease without a job: it ends with a process, or with its time limit.

    `environment` is where the lease will be applied, one character per byte.
    """

    environment: dict[str, str]
    pid: int | None = None
    """The process that holds it; null: none, and the claim needs a time limit."""
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)
    name: str | None = None
    wait: float | None = None
    key: str | None = None
    """As in `SubmitRequest`."""
    adopt: bool = False
    """If the process uses GPUs already, lease these at once or not at all."""
    notify: list[str] = field(default_factory=list)
    """As in `SubmitRequest`."""


@dataclass(slots=True)
class SlurmLeaseRequest:
    """A lease for a job of Slurm on this node, at once or not at all: what its prolog knows.

    The names of the fields are those of the prolog's variables without SLURM_, in lower case.
    """

    job_id: int
    job_uid: int
    job_gid: int
    node: str = ""
    """SLURMD_NODENAME."""
    job_restart_count: int = 0


@dataclass(slots=True)
class SlurmEndRequest:
    """How a job of Slurm ended on this node: what its epilog knows."""

    job_exit_code: int | None = None
    """As wait(2) has it."""


@dataclass(slots=True)
class SlurmEnvironmentRequest:
    """The variables of a task of Slurm before its lease is applied, one character per byte."""

    environment: dict[str, str]
    devices: list[int] = field(default_factory=list)
    """The numbers of the GPUs' device files that it may open; none: unknown."""


@dataclass(slots=True)
class SlurmCommandRequest:
    """What `gpulease run` hands to the node, as JSON in the variable GPULEASE_SLURM of the job."""

    argv: list[str] = field(default_factory=list)
    """The command, one character per byte."""
    cwd: str = "/"
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)
    job: int | None = None
    """The job of Slurm with these options: jobs that are submitted inside it inherit the variable.

    None before its first task.
    """


@dataclass(slots=True)
class AdoptRequest:
    """A lease for a process that uses GPUs already, and for all processes below it.

    It is on these GPUs, for as much as the process holds there, or more if the claim has a size.
    """

    pid: int
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    """Its memory, `exclusive` and `time_limit`."""
    name: str | None = None
    key: str | None = None
    """As in `SubmitRequest`."""


@dataclass(slots=True)
class NestedRequest:
    """A part of the lease under which the calling process runs.

    `environment` is where it will be applied, one character per byte.
    """

    environment: dict[str, str]
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)
    argv: list[str] = field(default_factory=list)
    """The command to run there, one character per byte; empty for none."""


@dataclass(slots=True)
class PoolUsage:
    """What the memory pool of a framework holds on one GPU, in bytes; null if unknown."""

    gpu: str
    pool: int | None = None
    peak: int | None = None
    limit: int | None = None


@dataclass(slots=True)
class UsageRequest:
    """What a process of a job reports of one framework in it."""

    framework: str
    """Empty if all frameworks failed."""
    version: str
    gpus: list[PoolUsage]
    state: str | None = None
    """limited or failed: what the hook did about it; null if only the pools are reported."""
    why: str | None = None
    """What failed."""
    steps: int | None = None
    """Training steps so far, and the seconds that they took."""
    seconds: float | None = None


@dataclass(slots=True)
class ExtendRequest:
    """Seconds to add to the time limit of a job; may be negative."""

    by: float


@dataclass(slots=True)
class DrainRequest:
    """Why a GPU is drained. The body may be left out."""

    why: str | None = None


@dataclass(slots=True)
class PauseRequest:
    """Why the queue is paused. The body may be left out."""

    why: str | None = None


@dataclass(slots=True)
class ReserveRequest:
    """GPUs to set apart for a time. With neither `gpus` nor `named`, all of them."""

    lasts_for: float
    """Seconds."""
    begins_at: str | None = None
    """An instant in ISO 8601; null: now, or of a recurring window the next time."""
    cron: str | None = None
    """When it recurs, as five fields of crontab(5) in the machine's time zone."""
    gpus: int | None = None
    """How many; the daemon chooses them."""
    named: list[str] = field(default_factory=list)
    """GPUs by index, UUID or the beginning of the UUID."""
    users: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    name: str | None = None
    lifts_limits: bool = False
    """While it is on, limits do not keep jobs of its users waiting."""


@dataclass(slots=True)
class CancelRequest:
    """How to cancel a job. The body may be left out."""

    grace: float | None = None
    """Seconds until SIGKILL, if that is sooner than the grace of the job."""


@dataclass(slots=True)
class WaitRequest:
    """The jobs to wait for."""

    jobs: list[int]
    timeout: float | None = None
    """Seconds after which the answer ends; null: when all jobs have ended."""


@dataclass(slots=True)
class CancelJobsRequest:
    """Which jobs to cancel together: those that wait or run and match every field that is given."""

    jobs: list[int] | None = None
    """Their ids; null: any."""
    array: int | None = None
    """The id of their array; null: any."""
    user: str | None = None
    """Their owner; null: the caller, or with `jobs` or `array` anyone."""
    name: str | None = None
    """A pattern for their names, such as "sweep*"."""
    grace: float | None = None
    """As in `CancelRequest`."""


@dataclass(slots=True)
class EditRequest:
    """New values for waiting jobs, for all of them or none; null leaves a value as it is."""

    jobs: list[int]
    memory: int | None = None
    """As in `ClaimRequest`, like `share`; either replaces both ends of a range."""
    share: float | None = None
    memory_bound: int | None = None
    share_bound: float | None = None
    gpus: int | None = None
    named: list[str] | None = None
    """As in `ClaimRequest`; an empty list: any."""
    model: str | None = None
    """As in `ClaimRequest`; empty: any."""
    min_vram: int | None = None
    """As in `ClaimRequest`; 0: any."""
    same_model: bool | None = None
    ram: int | None = None
    """As in `ClaimRequest`, like `cpus`; 0: none."""
    cpus: int | None = None
    linked: bool | None = None
    time_limit: float | None = None
    """Seconds; 0: no limit."""
    name: str | None = None
    priority: Literal["low", "normal", "high"] | None = None
    nice: int | None = None
    held: bool | None = None
    begin_at: str | None = None
    """An instant in ISO 8601, or "now"."""
    after: list[str] | None = None
    """As in `QueueRequest`; an empty list: none."""
    retries: int | None = None
    """As in `QueueRequest`; those that it has had count."""
    only_waiting: bool = False
    """Leave out jobs that do not wait, as elements of an array that have started."""


@dataclass(slots=True)
class MoveRequest:
    """A new place for waiting jobs, for all of them or none."""

    jobs: list[int]
    before: int | None = None
    """The waiting job that they go before; null: before all others of their owner."""
    only_waiting: bool = False
    """Leave out jobs that do not wait, as elements of an array that have started."""


@dataclass(slots=True)
class KeepRequest:
    """For how many seconds a job may be idle; by default an hour, at most a day."""

    span: float | None = None


@dataclass(slots=True)
class ErrorBody:
    """What went wrong: a stable code for programs, a message, and a hint if there is one."""

    code: str
    message: str
    hint: str | None = None
    field: str | None = None
    """The field of the request that it is about, such as claim.gpus; `message` names it too."""
    value: str | None = None
    reason: str | None = None
    """Why `value` cannot be used there."""


@dataclass(slots=True)
class ErrorReply:
    """The body of every response that is not a success (2xx)."""

    error: ErrorBody
