"""What the views of jobs, leases and the machine are drawn from, and how they write instants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from gpulease.domain.enforcement import UncoveredProcess
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.service.hook_reports import HookReports
from gpulease.service.idleness import IdleWatch
from gpulease.service.overuse import OveruseWatch
from gpulease.service.usage import PoolSeen
from gpulease.wire.machine import EnforcementLevelView


class EnforcementLevels(Protocol):
    """What can hold jobs to their leases on this machine."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The levels that hold every lease granted now."""

    def views(self) -> list[EnforcementLevelView]:
        """Return each level with what it does here."""


@dataclass(frozen=True, slots=True)
class ViewSources:
    """What the views show besides the state of the scheduler."""

    driver: Callable[[], str | None]
    simulated: bool
    directory_of: Callable[[JobId], Path]
    """Where the record, the output and the socket of a job are."""
    enforcement: EnforcementLevels
    overuse: OveruseWatch
    idleness: IdleWatch
    hooks: HookReports
    utilization: Callable[[JobId], int | None] = lambda _: None
    unheld: Callable[[JobId], Sequence[UncoveredProcess]] = lambda _: ()
    pools_of: Callable[[Job], Sequence[PoolSeen]] = lambda _: ()


def instant(at: datetime | None) -> str | None:
    """Return an instant in ISO 8601, in UTC with milliseconds; None stays None."""
    if at is None:
        return None
    return at.astimezone(UTC).isoformat("T", "milliseconds")[:-6] + "Z"


def whole_minute(at: datetime) -> datetime:
    """Round up: a prediction is not exact, and a stream of jobs shows each change."""
    return at + timedelta(seconds=-at.timestamp() % 60)
