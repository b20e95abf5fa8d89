"""What the queue is asked for: by an admin in its settings, by a user for one job."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from gpulease.domain.gpu import JobId


class Priority(StrEnum):
    """The priority class of a job; all jobs of a higher class go first."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    """For admins only."""


class Condition(StrEnum):
    """How another job has to end before a job may start."""

    OK = "ok"
    """With exit status 0."""
    FAIL = "fail"
    """In any other way."""
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Dependency:
    """A job that has to end first. Dependencies that are met are removed."""

    job: JobId
    condition: Condition = Condition.OK
    whole_array: bool = False
    """All elements of the array `job` have to end first."""

    def __str__(self) -> str:
        return f"{self.job}{'*' if self.whole_array else ''}:{self.condition}"


@dataclass(frozen=True, slots=True)
class WantedDependency:
    """A dependency as a user writes it: on a job, on an array, or on one element of it."""

    job: JobId
    index: int | None = None
    condition: Condition = Condition.OK

    def __str__(self) -> str:
        return str(self.job) if self.index is None else f"{self.job}_{self.index}"


@dataclass(frozen=True, slots=True)
class Indices:
    """The indices of an array to submit, in ascending order."""

    indices: tuple[int, ...]
    most_running: int | None = None
    """How many elements may hold memory at once; None: any number."""


@dataclass(frozen=True, slots=True)
class ArrayElement:
    """The place of a job in an array."""

    job: JobId
    """The id of the array, which is the id of its first element."""
    index: int
    most_running: int | None = None
    """How many elements may hold memory at once; None: any number."""


FIRST_RETRY_DELAY = timedelta(seconds=10)
LONGEST_RETRY_DELAY = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """When and in what order a job may start, besides what its claim needs."""

    priority: Priority = Priority.NORMAL
    nice: int = 0
    """A factor on the order within the class: from -20 to 19, higher starts later."""
    held: bool = False
    """It does not start until it is no longer held."""
    begin_at: datetime | None = None
    """It does not start before."""
    after: tuple[Dependency, ...] = ()
    """The jobs that it still waits for."""
    requeue: bool = False
    """It is queued again if the machine fails under it."""
    retries: int = 0
    """How often it is tried again if it fails."""
    retry_on: tuple[int, ...] = ()
    """The exit statuses after which it is tried again, as a shell shows them; empty: any but 0."""
    retry_delay: timedelta = FIRST_RETRY_DELAY
    """How long the first retry waits; each further one waits twice as long."""
    preemptible: bool = False
    """It makes way for jobs that are not preemptible, and is queued again."""
    array: ArrayElement | None = None
    aging_since_at: datetime | None = None
    """Since when its age counts: since it was among the first eligible jobs of its user."""
    moved_before: JobId | None = None
    """The queued job that it goes before by request; 0: before all others of its owner."""
    moved_by_admin: bool = False
    """An admin moved it: it rises to the place of that job, and the job does not sink."""
    requeued: int = 0
    """How often it was queued again."""
    retried: int = 0
    """How often it was tried again after it had failed."""


NO_OPTIONS = QueueOptions()
"""The options of a job for which nothing was asked."""


@dataclass(frozen=True, slots=True)
class QueuePause:
    """No job starts until an admin ends the pause; running jobs continue."""

    by: str
    why: str
    """Empty if no reason was given."""
    at: datetime

    def __str__(self) -> str:
        return f"{self.by} paused the queue" + (f": {self.why}" if self.why else "")


class PolicyName(StrEnum):
    """In which order waiting jobs start."""

    FAIR = "fair"
    """By age over predicted cost and the user's share. Whatever delays no reservation starts."""
    EASY = "easy"
    """In the order of submission, with EASY backfill: a later job starts early if the first is not
    delayed, should every job use its whole time limit."""
    FIFO = "fifo"
    """Strictly in the order of submission."""


_NO_LIMIT = 100.0
"""More utilization than the jobs on one GPU can have together."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Every number that the order and the placement of jobs depend on."""

    name: PolicyName = PolicyName.FAIR
    aging_jobs: int = 10
    """So many jobs of a user gain age at a time, the first submitted. A mass submission therefore
    gains no more by waiting than ten jobs do."""
    run_time_samples: int = 10
    """The prediction is the mean run time of so many of the last similar jobs."""
    reservation_slowdown: float = 5.0
    """Memory is reserved for a job once it has waited so many times as long as it will probably
    run. Between 5 and 15 hardly anything changes; less than 4 makes all jobs wait longer."""
    soft_reservation_after: timedelta = timedelta(hours=24)
    """From this age on, memory is reserved for a job in any case, at the predicted ends of
    others. The oldest such job that does not fit has the reservation."""
    backfill_factor: float = 2.0
    """Under a soft reservation, a job counts with so many times its predicted run time. With 1,
    wide jobs starve."""
    hard_reservation_after: timedelta = timedelta(hours=36)
    """From this age on, the reservation assumes that jobs use their whole time limit."""
    hard_reservation_waits: float = 2.0
    """The hard reservation begins at no less than so many times the 90th percentile of recent
    waits. On an overloaded server, a constant age would make every job wait for wide ones."""
    unlimited_run_time: timedelta = timedelta(days=7)
    """The time limit that a hard reservation assumes for a job without one."""
    most_utilization: float = 2.0
    """A GPU with a job takes another one only if the sum of their utilizations is at most this.
    Two busy jobs together do at least as much as one after the other; three often do less."""
    settling_time: timedelta = timedelta(minutes=2)
    """A job that holds a GPU for less counts with its usual utilization on top of the measured
    one: it is loading, and does not compute yet."""
    most_sharing: int = 2
    """The most jobs on a GPU whose utilization is unknown."""
    preemption_grace: timedelta = timedelta(minutes=5)
    """A preempted job has at most so long to end, whatever grace it asked for: enough to save its
    work. Another job waits for its memory meanwhile."""

    @property
    def shares_by_memory_alone(self) -> bool:
        """Whether as many busy jobs share a GPU as fit in its memory."""
        return self.most_utilization >= _NO_LIMIT
