"""What the daemon answers about jobs and their use, and about what went wrong.

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
