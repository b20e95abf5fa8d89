"""What a user asks of the queue for one job, and what the queue notes about it."""

from dataclasses import dataclass
from datetime import datetime
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
