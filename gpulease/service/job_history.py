"""Which ended jobs a listing asks for, and what it shows of each."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

FAILED: Final = "failed"
"""As `has_failed` in `domain.dependencies` means it."""


@dataclass(frozen=True, slots=True)
class EndedJobsQuery:
    """The filters and the page of a listing of ended jobs."""

    user: str | None = None
    since: datetime | None = None
    """The earliest end."""
    outcome: str | None = None
    """An `Outcome`, or `FAILED`."""
    name: str | None = None
    """A shell pattern, as in glob(7)."""
    name_of: str | None = None
    """The only user with names to compare; None: all."""
    before: int | None = None
    """Only jobs with lower ids."""
    limit: int = 1000


class EndedJob(NamedTuple):
    """An ended job, as a listing shows it."""

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
