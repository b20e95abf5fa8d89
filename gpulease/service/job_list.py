"""Which jobs a listing asks for, and what it gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State

FAILED: Final = "failed"
"""As `has_failed` in `domain.dependencies` means it."""
MOST_LISTED = 10_000
"""Jobs in one answer, if some of them may have ended."""


@dataclass(frozen=True, slots=True)
class JobQuery:
    """The filters and the page of a listing; live jobs only, unless `ended` or `state` says so."""

    user: str | None = None
    state: str | None = None
    """A `State`, an `Outcome`, or `FAILED`."""
    ended: bool = False
    """Include jobs that have ended."""
    array: int | None = None
    index: int | None = None
    newest: bool = False
    """The newest jobs first, and not the oldest."""
    after: int | None = None
    """Begin with the job that follows the one with this id."""
    limit: int | None = None
    name: str | None = None
    """A shell pattern, as in glob(7)."""
    name_of: str | None = None
    """The only user with names that the caller may see; None: all."""
    since: datetime | None = None
    """Leave out jobs that ended before."""

    @property
    def most(self) -> int | None:
        """How many jobs a page has at most: live ones, and those of an array, need no limit."""
        is_bounded = self.array is not None or not self.has_ended
        return None if self.limit is None and is_bounded else self.limit or MOST_LISTED

    @property
    def has_ended(self) -> bool:
        """Whether some of the jobs may have ended."""
        lives = self.state is not None and self.state in set(State) - {State.ENDED}
        return not lives and (self.ended or self.state is not None)

    @property
    def from_newest(self) -> bool:
        """Whether pages begin at the newest job, as they do where ended jobs were not limited."""
        return self.newest or (self.limit is None and self.most is not None)


class JobPage(NamedTuple):
    """Some of the jobs of a listing, in its order."""

    jobs: Sequence[Job]
    total: int
    """The number of jobs on all pages."""
    next: JobId | None
    """The job after which the next page begins; None on the last page."""


class EndedJob(NamedTuple):
    """An ended job in brief: a page of a long history is read six times as fast as whole jobs."""

    id: int
    array: int | None
    array_index: int | None
    name: str
    user: str
    is_hold: bool
    slurm_job: int | None
    outcome: str
    exit_code: int | None
    exit_signal: int | None
    submitted_at: datetime
    granted_at: datetime | None
    ended_at: datetime
    gpus: int
    asked: int | None
    """Bytes; None for a share."""
    leased: int | None
    """Bytes, the largest of its leases; None if it held none."""
    used: int | None
    """The most bytes that it needed on a GPU."""
    utilization: int | None
    time_limit_us: int | None
    alike: str | None
    same: str | None
    out_of_memory: bool = False
    ram_peak: int | None = None
    cpu_us: int | None = None


class EndedPage(NamedTuple):
    """Some of the ended jobs of a listing, in its order."""

    jobs: Sequence[EndedJob]
    next: JobId | None
    """The job after which the next page begins; None on the last page."""
