"""What a client asks of the daemon.

How text travels, and what people read in place of a name of the wire.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

API_PREFIX = "/v1"

# Limits that both the command and the daemon check.
LARGEST_REQUEST = 6 * 1024 * 1024
"""Bytes of a body: LARGEST_EXEC in JSON, where a byte above 127 takes two."""
LARGEST_EXEC = 2 * 1024 * 1024
"""Bytes of arguments and environment: a quarter of the usual stack limit, execve(2)."""
LARGEST_STRING = 128 * 1024
"""Bytes of one argument or variable with its NUL: MAX_ARG_STRLEN of execve(2)."""
LONGEST_NAME = 128
"""Characters of the name of a job."""
LARGEST_RETRY = 4.0
"""Factor of memory for the next attempt of a job."""
_POINTER = 8


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
    key: str | None = None
    """Names this submission among all of its user: sent again, it is answered with the job that it
    made the first time, and makes no other. So it can be repeated when an answer was lost."""
    retry_oom: float | None = None
    """How much more memory to try again with, above 1, when it ends for want of GPU memory."""


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
    key: str | None = None
    """As of a job, see `SubmitRequest`."""


@dataclass(slots=True)
class NestedRequest:
    """A part of the lease under which the process that asks runs already.

    `environment` is what it is to be put into, one character per byte.
    """

    environment: dict[str, str]
    claim: ClaimRequest = field(default_factory=ClaimRequest)
    options: WorkerOptionsRequest = field(default_factory=WorkerOptionsRequest)


@dataclass(slots=True)
class PoolUsage:
    """What the pool of a framework holds on one GPU, in bytes; null where it does not tell."""

    gpu: str
    pool: int | None = None
    peak: int | None = None
    limit: int | None = None


@dataclass(slots=True)
class UsageRequest:
    """What a process of a job says of one framework in it."""

    framework: str
    version: str
    gpus: list[PoolUsage]


@dataclass(slots=True)
class ExtendRequest:
    """More time for a job, in seconds, on top of its time limit."""

    by: float


@dataclass(slots=True)
class DrainRequest:
    """Why nothing more is to be granted on a GPU; no body at all is the same as this without."""

    why: str | None = None


@dataclass(slots=True)
class CancelRequest:
    """How a job is to be cancelled; no body at all is the same as this without a grace."""

    grace: float | None = None
    """Seconds until what is left of it is killed, if that is sooner than the job's own grace."""


@dataclass(slots=True)
class KeepRequest:
    """For how many seconds a job may be idle; an hour if it does not say, at most a day."""

    span: float | None = None


def exec_size(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return how many bytes execve(2) counts for arguments and environment."""
    strings = [*argv, *(f"{name}={value}" for name, value in environment.items())]
    return sum(len(os.fsencode(each)) + 1 + _POINTER for each in strings) + 2 * _POINTER


def to_wire(text: str) -> str:
    """Return a string of the operating system as one character per byte."""
    return os.fsencode(text).decode("latin-1")


def from_wire(text: str) -> str:
    """Return the operating system's string for `text`; the inverse of `to_wire`.

    Raises:
        UnicodeEncodeError: `text` holds a character that is not a byte.
    """
    return os.fsdecode(text.encode("latin-1"))


def spoken(name: str) -> str:
    """Return a name of the wire, such as time_limit, as people see and type it: time-limit."""
    return name.replace("_", "-")
