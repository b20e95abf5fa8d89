"""The shapes of the daemon's answers about use: past jobs, the report, and the shares of users.

A field that was added later has a default, for an older daemon that does not send it.
"""

from dataclasses import dataclass, field

from gpulease.wire.jobs import JobKind, Outcome


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
    slurm_job: int | None = None
    """The JobId of Slurm, for its jobs."""
    out_of_memory: bool = False
    """It failed because it ran out of GPU memory."""
    ram_peak: int | None = None
    """As in `JobView`, like `cpu_seconds`."""
    cpu_seconds: float | None = None


@dataclass(slots=True)
class HistoryView:
    """Ended jobs, the newest first."""

    jobs: list[PastJobView]
    before: int | None = None
    """The jobs with ids below this follow; null if there are none."""


@dataclass(slots=True)
class UseView:
    """What the jobs of one user asked for and used: those that ended, and those that hold memory,
    up to now."""

    user: str
    jobs: int
    out_of_memory: int
    """How many of them ran out of GPU memory."""
    gpu_seconds: float
    asked: float
    """Byte-seconds leased."""
    used: float
    """Byte-seconds of the peaks, of the leases whose use is known."""
    unused: float = 0.0
    """Byte-seconds that were leased and never needed."""
    mean_wait: float | None = None
    """Seconds from the submission to the lease, of the jobs that got it since `ReportView.since`.
    The same in `ShareView`."""
    longest_wait: float | None = None
    measured: float | None = None
    """Byte-seconds leased where the use is known: `used` is a part of them. Null from an older
    daemon, which leaves out all other jobs."""
    measured_seconds: float | None = None
    """GPU-seconds of the same leases."""
    cpu_seconds: float | None = None
    """CPU time of the jobs that ended; null where it is unknown of all of them."""
    ram_peak: int | None = None
    """The most bytes of RAM that one of them used."""


@dataclass(slots=True)
class UsePartView:
    """The same for the jobs of one group, week or month."""

    name: str
    """The group under which jobs were submitted, or the first day: 2026-11-16."""
    jobs: int
    out_of_memory: int
    gpu_seconds: float
    asked: float
    used: float
    unused: float
    mean_wait: float | None
    longest_wait: float | None
    measured: float | None = None
    measured_seconds: float | None = None
    cpu_seconds: float | None = None
    ram_peak: int | None = None


@dataclass(slots=True)
class PredictionsView:
    """How good predictions were: the medians of their absolute errors, in seconds."""

    starts: int
    """The jobs that waited with an expected start; the first one counts."""
    start_error: float | None
    runs: int
    """The jobs with a predicted run time whose end shows how long they run."""
    run_error: float | None
    ranges: int = 0
    """The jobs that waited with a range for their start; the first one counts."""
    in_range: int = 0
    """Those that started in it."""


@dataclass(slots=True)
class ShareView:
    """What one user has used, holds and waits for, and the user's place in the order."""

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
    """Asked and used, by user, of the jobs that ended after `since` or hold memory."""

    since: str | None
    users: list[UseView]
    predictions: PredictionsView | None = None
    """Null from an older daemon."""
    by: str = "user"
    """Or group, week (from Monday) or month, in which the jobs ended."""
    parts: list[UsePartView] = field(default_factory=list)
    """By group, week or month; `users` is empty then."""
