"""The JSON shapes that the daemon and its clients share.

Plain dataclasses, so that the daemon can describe them in its OpenAPI document and the command can
read them without paying for what the daemon needs. Sizes are bytes, spans seconds, instants ISO
8601 in UTC, unknown is null. Arguments, paths and environments of jobs are bytes to the kernel:
they travel *one character per byte* (Latin-1), see `to_wire` and `from_wire`.
"""

import os
from dataclasses import dataclass, field
from typing import Literal

API_PREFIX = "/v1"
LARGEST_REQUEST = 6 * 1024 * 1024
"""Bytes of a request's body; the kernel accepts less than this for arguments and environment."""

GpuState = Literal["available", "drained", "unreadable", "lost"]
JobState = Literal["queued", "granted", "active", "releasing", "ended"]
Outcome = Literal[
    "exited", "signaled", "released", "cancelled", "time_limit", "gave_up", "launch_failed", "lost"
]
JobKind = Literal["run", "hold"]
CheckState = Literal["ok", "warning", "failure"]


def to_wire(text: str) -> str:
    """Return a string of the operating system as one character per byte."""
    return os.fsencode(text).decode("latin-1")


def from_wire(text: str) -> str:
    """Return the operating system's string for `text`; the inverse of `to_wire`.

    Raises:
        UnicodeEncodeError: `text` holds a character that is not a byte.
    """
    return os.fsdecode(text.encode("latin-1"))


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
class ClaimRequest:
    """What a job asks for. `memory` (bytes) or `share` (percent), or neither for the default."""

    memory: int | None = None
    share: float | None = None
    gpus: int = 1
    exclusive: bool = False
    time_limit: float | None = None


@dataclass(slots=True)
class WorkerOptionsRequest:
    """How the leased GPUs are presented to the job."""

    visible: Literal["uuid", "index"] = "uuid"
    growth: bool = False
    split: int = 1
    inter_op_threads: int | None = None
    intra_op_threads: int | None = None
    log_placement: bool = False
    soft_placement: bool = False
    strict: bool = False


@dataclass(slots=True)
class TerminalRequest:
    """The terminal that a job takes after."""

    rows: int
    columns: int
    attributes: list[int] | None = None
    """As termios(3) has them: iflag, oflag, cflag, lflag, ispeed, ospeed, then the control
    characters; null: those of the system."""
    stderr: bool = True
    """Whether standard error is the terminal as well; otherwise it is a stream of its own."""


@dataclass(slots=True)
class EarlySignalRequest:
    """A signal for the main process, `before` seconds ahead of the end of its time."""

    signal: int
    before: float


@dataclass(slots=True)
class SubmitRequest:
    """A job to queue. `argv`, `cwd` and `environment` are one character per byte."""

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    umask: int = 0o022
    soft_limits: dict[str, int] = field(default_factory=dict)
    """By the names of resource.RLIMIT_*, such as "RLIMIT_NOFILE"; -1 is unlimited."""
    nice: int = 0
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)
    name: str | None = None
    attached: bool = False
    """Somebody will attach at once: the output waits for them, and stdin is theirs."""
    wait: float | None = None
    """Seconds to wait for a grant; 0 is not at all, None is without end."""
    terminal: TerminalRequest | None = None
    """A pseudo-terminal of this kind for the job; null: three streams of their own."""
    early_signal: EarlySignalRequest | None = None
    grace: float | None = None
    """Seconds between SIGTERM and SIGKILL; null: as the daemon is configured."""


@dataclass(slots=True)
class HoldRequest:
    """A lease without a job to queue: it lasts as long as a process, or as long as its time limit.

    `environment` is what the lease is to be put into, one character per byte.
    """

    environment: dict[str, str]
    pid: int | None = None
    """The process that holds it; null: nobody, and then the claim needs a time limit."""
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)
    name: str | None = None
    wait: float | None = None


@dataclass(slots=True)
class ExtendRequest:
    """More time for a job, in seconds, on top of its time limit."""

    by: float


@dataclass(slots=True)
class CancelRequest:
    """How a job is to be cancelled; no body at all is the same as this without a grace."""

    grace: float | None = None
    """Seconds until what is left of it is killed, if that is sooner than the job's own grace."""


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
class LeaseView:
    """One GPU's part of what a job holds, or held."""

    gpu: str
    memory: int
    used: int | None
    peak: int | None
    enforced_by: list[str]


@dataclass(slots=True)
class RefusalView:
    """Why one GPU cannot take a waiting job now."""

    gpu: str
    index: int
    why: str


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
    """As a shell shows it: the job's own, 128 + signal, or 124 for the time limit."""
    pid: int | None
    directory: str | None
    """Where the job's own socket is, once it has been launched."""
    hint: str | None = None
    """What to do about `reason`, where something can be done."""
    kind: JobKind = "run"
    terminal: bool = False
    """Whether it runs on a pseudo-terminal."""
    main_exited_at: str | None = None
    """When the main process ended, while others of the job keep its leases."""
    processes: int | None = None
    """How many processes it has; null where nobody counted."""
    refusals: list[RefusalView] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)
    events: list[EventView] = field(default_factory=list)


@dataclass(slots=True)
class JobList:
    """The jobs of a listing, oldest first."""

    jobs: list[JobView]


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


@dataclass(slots=True)
class ProcessView:
    """One process on a GPU; `job` is null for an unmanaged one."""

    pid: int
    user: str | None
    name: str | None
    command: str | None
    memory: int | None
    job: int | None


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


@dataclass(slots=True)
class CheckView:
    """One thing that `doctor` looked at, and its mend where something is wrong."""

    name: str
    state: CheckState
    message: str
    mend: str | None = None


@dataclass(slots=True)
class DoctorView:
    """What the daemon found out about this machine and itself."""

    checks: list[CheckView]
