"""Windows: GPUs that an admin set apart for a time, and the jobs that may start on them.

While a window is on, only jobs of its users start on its GPUs. Before that, other jobs start there
only if they end before it begins. Instants of recurring windows are computed elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NewType

from gpulease.domain.gpu import GpuMemory, GpuUuid
from gpulease.domain.placement import Obstacle, ObstacleKind
from gpulease.units import format_span

WindowId = NewType("WindowId", int)
Span = tuple[datetime, datetime]
"""The begin and the end of an occurrence."""
_MOMENT = timedelta(microseconds=1)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Window:
    """GPUs that an admin set apart, once or at recurring times."""

    id: WindowId
    name: str
    gpus: int
    uuids: tuple[GpuUuid, ...]
    """Which GPUs; empty for any."""
    begins_at: datetime
    """When it begins; for a recurring window, the earliest begin."""
    lasts_for: timedelta
    cron: str | None
    """When it recurs, as five fields of crontab(5)."""
    users: tuple[str, ...]
    groups: tuple[str, ...]
    created_by: str
    created_at: datetime
    lifts_limits: bool = False
    """While it is on, limits do not keep jobs of its users waiting."""

    def spans(
        self, since: datetime, next_begin: Callable[[str, datetime], datetime | None]
    ) -> Iterator[Span]:
        """Yield the occurrences that end after `since`; the first may have begun.

        `next_begin` returns the first instant of a recurring window at or after another.
        """
        if self.cron is None:
            if self.begins_at + self.lasts_for > since:
                yield self.begins_at, self.begins_at + self.lasts_for
            return
        begin = next_begin(self.cron, max(self.begins_at, since - self.lasts_for + _MOMENT))
        while begin is not None:
            yield begin, begin + self.lasts_for
            begin = next_begin(self.cron, begin + _MOMENT)

    def is_over(self, at: datetime) -> bool:
        """Tell whether the window has ended and does not recur."""
        return self.cron is None and self.begins_at + self.lasts_for <= at

    @property
    def reserved_for(self) -> str:
        """Whose jobs may start on its GPUs, as text."""
        users = [", ".join(self.users)] if self.users else []
        groups = [f"group {', '.join(self.groups)}"] if self.groups else []
        return " and ".join(users + groups) or "no one"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """The current or the next time of a window."""

    window: Window
    begins_at: datetime
    ends_at: datetime
    admits: frozenset[str] = frozenset()
    """The users with jobs that may start then."""
    begin_text: str = ""
    """The begin in the machine's time zone."""
    end_text: str = ""
    gpus_before: tuple[GpuUuid, ...] = ()
    """The GPUs that the pass before chose, if the window names none."""

    def is_on(self, at: datetime) -> bool:
        """Tell whether the window is on."""
        return self.begins_at <= at < self.ends_at


@dataclass(frozen=True, slots=True)
class Stay:
    """A job that holds memory of a GPU, and when it is expected to end."""

    gpu: GpuUuid
    user: str
    ends_at: datetime


class Calendar:
    """The windows as of one planning pass, and the GPUs of each."""

    def __init__(
        self,
        occurrences: Iterable[Occurrence] = (),
        gpus: Sequence[GpuMemory] = (),
        stays: Iterable[Stay] = (),
    ) -> None:
        """Choose the GPUs of the windows that name none; `stays` are the jobs on `gpus`."""
        in_order = sorted(occurrences, key=lambda each: (not each.window.uuids, each.begins_at))
        self.gpus: dict[WindowId, tuple[GpuUuid, ...]] = {}
        """The GPUs of each window; if it names none, they may change until it begins."""
        self._on: dict[GpuUuid, list[Occurrence]] = {gpu.uuid: [] for gpu in gpus}
        self._begins: dict[str, dict[GpuUuid, float]] = {}
        stays_by_gpu: dict[GpuUuid, list[Stay]] = {}
        # Most machines have no window, and a pass has to be fast.
        for stay in stays if in_order else ():
            stays_by_gpu.setdefault(stay.gpu, []).append(stay)
        for each in in_order:
            chosen = each.window.uuids or self._choose(each, gpus, stays_by_gpu)
            self.gpus[each.window.id] = chosen
            for gpu in gpus:
                if gpu.uuid in chosen or gpu.reading.parent in chosen:
                    self._on[gpu.uuid].append(each)
        for windows in self._on.values():
            windows.sort(key=lambda each: each.begins_at)

    def first_against(self, user: str, gpu: GpuUuid) -> Occurrence | None:
        """Return the first occurrence on a GPU that does not admit the jobs of a user."""
        return next((each for each in self._on.get(gpu, ()) if user not in each.admits), None)

    def begins_against(self, user: str) -> Mapping[GpuUuid, float]:
        """Return when the jobs of a user have to be gone, in seconds, by GPU; {} for no window."""
        if user not in self._begins:
            first = ((gpu, self.first_against(user, gpu)) for gpu, on in self._on.items() if on)
            self._begins[user] = {
                gpu: each.begins_at.timestamp() for gpu, each in first if each is not None
            }
        return self._begins[user]

    def obstacle(
        self,
        user: str,
        gpu: GpuMemory,
        at: datetime,
        lasts_for: timedelta,
        *,
        certain: bool,
        alone: bool,
    ) -> Obstacle | None:
        """Return why a job cannot start on a GPU because of a window; None if it can.

        `lasts_for` is its time limit, if it is `certain`, else the longest expected run time. A job
        that needs this GPU `alone` could start there with a shorter limit.
        """
        first = self.first_against(user, gpu.uuid)
        if first is None or at + lasts_for <= first.begins_at:
            return None
        why = _why(first, at, certain=certain, alone=alone)
        return Obstacle(
            gpu.uuid, gpu.index, ObstacleKind.WINDOW, why, mig_index=gpu.reading.mig_index
        )

    def _choose(
        self,
        occurrence: Occurrence,
        gpus: Sequence[GpuMemory],
        stays: Mapping[GpuUuid, Sequence[Stay]],
    ) -> tuple[GpuUuid, ...]:
        """Return the GPUs that are free of other users' jobs first.

        A job that would run into the window starts only on other GPUs, so these stay the first.
        """

        def rank(gpu: GpuMemory) -> tuple[bool, datetime, bool, bool, tuple[int, int]]:
            there = stays.get(gpu.uuid, ())
            others = [each.ends_at for each in there if each.user not in occurrence.admits]
            out_of_service = gpu.headroom is None or gpu.drained is not None
            free_at = max([*others, occurrence.begins_at])
            is_new = gpu.uuid not in occurrence.gpus_before
            return out_of_service, free_at, is_new, len(others) == len(there), gpu.sort_key

        free = (gpu for gpu in gpus if self._is_free(gpu, occurrence))
        return tuple(gpu.uuid for gpu in sorted(free, key=rank)[: occurrence.window.gpus])

    def _is_free(self, gpu: GpuMemory, wanted: Occurrence) -> bool:
        if gpu.reading.mig_mode:
            return False
        return all(
            wanted.ends_at <= each.begins_at or each.ends_at <= wanted.begins_at
            for each in self._on[gpu.uuid]
        )


def _why(first: Occurrence, at: datetime, *, certain: bool, alone: bool) -> str:
    name = first.window.name
    if first.begins_at <= at:
        return f"window {name} is on until {first.end_text}, for {first.window.reserved_for}"
    left = format_span(first.begins_at - at - (first.begins_at - at) % _MINUTE).replace(" ", "")
    hint = "" if left == "0s" or not alone else f"; with --time {left} it could start"
    would = "would" if certain else "may"
    return f"it {would} end after window {name} begins at {first.begin_text}{hint}"


def users_without_limits(occurrences: Iterable[Occurrence], at: datetime) -> frozenset[str]:
    """Return the users of the windows that are on and lift limits."""
    free = (each.admits for each in occurrences if each.window.lifts_limits and each.is_on(at))
    return frozenset[str]().union(*free)


def find_clash(
    window: Window,
    spans: Iterable[Span],
    others: Sequence[tuple[Window, Sequence[Span]]],
    machine_gpus: int,
) -> tuple[Window, datetime] | None:
    """Return another window that needs the same GPUs at the same time, and when; None if none.

    Two windows that name no GPU need different ones.
    """
    for begin, end in spans:
        beside = [
            (other, max(begin, first))
            for other, theirs in others
            for first, last in theirs
            if first < end and begin < last
        ]
        for other, at in beside:
            named_twice = not set(window.uuids).isdisjoint(other.uuids)
            if named_twice or window.gpus + _gpus_at(at, others) > machine_gpus:
                return other, at
    return None


def _gpus_at(at: datetime, windows: Sequence[tuple[Window, Sequence[Span]]]) -> int:
    return sum(
        window.gpus for window, spans in windows if any(begin <= at < end for begin, end in spans)
    )
