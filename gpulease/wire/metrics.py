"""The shapes of the daemon's answer about what it counts, since its start and in memory.

Counters never decrease while the daemon runs, and begin at 0 at its start.
"""

from dataclasses import dataclass

from gpulease.wire.jobs import JobState, Outcome


@dataclass(slots=True)
class HistogramView:
    """Durations, counted in buckets."""

    bounds: list[float]
    """The upper bound of each bucket, included, in seconds; the last bucket has none."""
    counts: list[int]
    """The number of durations in each bucket: one more than there are bounds."""
    sum: float
    """Seconds."""


@dataclass(slots=True)
class UserMetricsView:
    """The jobs of one user."""

    user: str
    """"other" for all users after the first 200."""
    submitted: int
    """New jobs, without those that continue an earlier one."""
    requeued: int
    """Jobs that continue an earlier one: it was queued again, or retried."""
    started: int
    failed: int
    """Jobs that ended without success, and not because somebody asked for that."""
    out_of_memory: int
    """Jobs that ran out of GPU memory."""
    over_lease: int
    """How often a job went over its lease."""
    ended: dict[Outcome, int]
    jobs: dict[JobState, int]
    """How many are queued and hold memory now, by state."""
    gpu_seconds: float
    """Seconds for which leases were held, summed over GPUs."""
    byte_seconds: float
    """The same times the leased bytes."""
    cpu_seconds: float = 0.0
    """CPU time of the jobs that have ended."""
    waits: HistogramView | None = None
    """From the submission of jobs to the grant of their leases; null from an older daemon."""
    queued_memory: int = 0
    """Bytes that queued jobs ask for, on all their GPUs, without jobs that may not start yet."""
    queued_gpus: int = 0
    """The GPUs of these jobs."""


@dataclass(slots=True)
class GpuFaultsView:
    """The faults of one kind of one GPU."""

    gpu: str
    kind: str
    """As in its health history: "xid 79", "lost"."""
    cause: str
    """application, contained, hardware, avoided, gone, or admin: an admin has to look."""
    count: int


@dataclass(slots=True)
class MetricsView:
    """What the daemon counts, and its own health."""

    version: str
    at: str
    started_at: str
    """When the daemon started."""
    observed_at: str | None
    """When it last read the GPUs."""
    users: list[UserMetricsView]
    faults: list[GpuFaultsView]
    waits: HistogramView
    """From the submission of jobs to the grant of their leases."""
    passes: HistogramView
    """Passes over the queue, with the observations that they wait for."""
    failed_passes: int
    commits: HistogramView
    """Commits of the database, with the flush to the disk."""
    failed_commits: int
    open_connections: int
    refused_connections: int
    """Connections of users who had too many."""
    failed_connections: int
    """Errors in accepting connections, such as too many open files."""
    database: int | None
    """Bytes of the database with its log; null if it cannot be read."""
    cpu_seconds: float
    """CPU time of the daemon."""
    resident: int
    """Bytes of memory of the daemon."""
    oldest_queued_at: str | None = None
    """When the oldest queued job that may start was submitted; null if there is none."""
    notifications_sent: int = 0
    """Messages that all receivers have."""
    notifications_given_up: int = 0
    notifications_waiting: int | None = None
    """Messages that are still to be sent; null if the database cannot be read."""
