"""What the views of jobs, leases and the machine have in common: sources, instants, and what users
see of each other's jobs where the admin hides commands: that they run, not what.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gpulease.domain.enforcement import UncoveredProcess
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.service.hook_reports import HookReports
from gpulease.service.idleness import IdleWatch
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import Clock
from gpulease.service.usage import PoolSeen
from gpulease.units import Share
from gpulease.wire.jobs import ClaimView, JobRowView, JobView
from gpulease.wire.machine import EnforcementLevelView, StatusView

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MINUTE = timedelta(minutes=1)
_OLD = timedelta(seconds=2)
_AGAIN = 8
"""Values from /proc that one answer reads again although they are not old."""
HIDDEN = "(hidden)"
"""Stands for a command, and for a name, which by default is part of the command."""


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
    cores: Callable[[JobId], Sequence[int]] = lambda _: ()
    """Returns the CPUs of a job that leases some."""
    ram_held_by: Callable[[Job], str] = lambda _: "watch"
    """Returns what holds a job to its RAM: kernel or watch."""
    unheld: Callable[[JobId], Sequence[UncoveredProcess]] = lambda _: ()
    pools_of: Callable[[Job], Sequence[PoolSeen]] = lambda _: ()


def instant(at: datetime | None) -> str | None:
    """Return an instant in ISO 8601, in UTC with milliseconds; None stays None."""
    if at is None:
        return None
    in_utc = at if at.tzinfo is UTC else at.astimezone(UTC)
    return in_utc.isoformat("T", "milliseconds")[:-6] + "Z"


def whole_minute(at: datetime) -> datetime:
    """Round up: a prediction is not exact, and a stream of jobs shows each change."""
    return rounded_up(at, _MINUTE)


def rounded_up(at: datetime, grain: timedelta) -> datetime:
    """Return the next instant that is a multiple of `grain`."""
    return at + timedelta(seconds=-at.timestamp() % grain.total_seconds())


def seconds_of(span: timedelta | None) -> float | None:
    """Return a span in seconds; None stays None."""
    return None if span is None else span.total_seconds()


def claim_view(claim: Claim, gpus: Mapping[GpuUuid, GpuReading]) -> ClaimView:
    """Return a claim as a wire object; `gpus` are the GPUs that are known."""
    memory, share = _size_and_share(claim.memory)
    memory_bound, share_bound = _size_and_share(claim.memory_bound)
    return ClaimView(
        memory=memory,
        share=share,
        gpus=claim.gpus,
        exclusive=claim.exclusive,
        time_limit=seconds_of(claim.time_limit),
        named=list(claim.named),
        named_labels=[gpus[uuid].label if uuid in gpus else uuid for uuid in claim.named],
        model=claim.model,
        min_vram=claim.min_vram,
        same_model=claim.same_model,
        memory_bound=memory_bound,
        share_bound=share_bound,
        ram=claim.ram,
        cpus=claim.cpus,
        linked=claim.linked,
    )


def _size_and_share(size: int | Share | None) -> tuple[int | None, float | None]:
    return (None, float(size.percent)) if isinstance(size, Share) else (size, None)


def redact_job(view: JobView, viewer: str | None) -> JobView:
    """Return a job as the user `viewer` may see it; None may see all."""
    if viewer in (None, view.user):
        return view
    return replace(
        view,
        command=HIDDEN,
        name=HIDDEN,
        # A failed launch names the program; reports of frameworks and uncovered processes do too.
        reason=None if view.outcome == "launch_failed" else view.reason,
        sized=None,
        leases=[replace(each, pools=[]) for each in view.leases],
        unheld=[],
        hooks=[],
        events=[replace(each, detail=None) for each in view.events],
    )


def redact_row(view: JobRowView, viewer: str | None) -> JobRowView:
    """Return a job in brief as the user `viewer` may see it; None may see all."""
    if viewer not in (None, view.user):
        view.command = view.name = HIDDEN
        view.reason = None if view.outcome == "launch_failed" else view.reason
    return view


def redact_machine(status: StatusView, viewer: str | None) -> StatusView:
    """Return a status without jobs as the user `viewer` may see it; None may see all."""
    if viewer is None:
        return status
    gpus = []
    for gpu in status.gpus:
        processes = [
            each
            if each.user == viewer
            else replace(each, command=HIDDEN, name=HIDDEN, container=None)
            for each in gpu.processes
        ]
        gpus.append(replace(gpu, processes=processes))
    return replace(status, gpus=gpus)


class Recent(Generic[K, V]):
    """Keeps values that are read from /proc: each reading lets other threads delay the answer.

    The first answer after a while reads all values that it needs. Answers that follow each other
    soon read the new ones and a few others, so that each is quick. For one thread.
    """

    def __init__(self, read: Callable[[K], V], clock: Clock, kept_for: timedelta = _OLD) -> None:
        self._read = read
        self._kept_for = kept_for
        self._clock = clock
        self._kept: dict[K, tuple[timedelta, V]] = {}
        self._now = timedelta(0)
        self._left = 0

    def begin(self) -> None:
        """Begin an answer."""
        self._now, self._left = self._clock.steady(), _AGAIN
        oldest = self._now - self._kept_for
        self._kept = {key: each for key, each in self._kept.items() if each[0] > oldest}

    def of(self, key: K) -> V:
        """Return a value that is at most some seconds old."""
        kept = self._kept.get(key)
        if kept is not None:
            if not self._left:
                return kept[1]
            self._left -= 1
        value = self._read(key)
        self._kept[key] = self._now, value
        return value
