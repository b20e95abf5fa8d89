"""Windows: reserve GPUs for a time, cancel that, and find the current or next time of each."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice, pairwise, takewhile

from gpulease.domain.calendar import Occurrence, Span, Window, WindowId, find_clash
from gpulease.domain.job import Owner
from gpulease.errors import BadValue, NoSuchWindow, WindowClash
from gpulease.service.ports import Clock, InThread, LocalTime, Store, Transaction

_COMPARE_FOR = timedelta(days=120)
_MOST_COMPARED = 300
"""Times of a recurring window that are compared with those of others."""
_CHANGE_OF_CLOCKS = timedelta(hours=1)
_LOOK_UP_AGAIN_AFTER = timedelta(minutes=1)
"""How long the groups of users are remembered."""


class Windows:
    """Reserves GPUs for a time, and knows the current or next time of each window."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        local_time: LocalTime,
        groups_of: Callable[[Owner], Collection[str]],
        in_writer: InThread,
    ) -> None:
        self._store = store
        self._clock = clock
        self._local_time = local_time
        self._groups_of = groups_of
        self._in_writer = in_writer
        self._current: dict[WindowId, tuple[datetime, Span]] = {}
        """The current or next time of recurring windows, and when that was found."""
        self._groups: dict[Owner, Collection[str]] = {}
        self._forget_groups_at: datetime | None = None

    async def reserve(self, window: Window, machine_gpus: int) -> Window:
        """Store a new window, and return it with its id and its name.

        Raises:
            BadValue: it has ended already, never begins, or runs into its own next time.
            WindowClash: another window has its name, or needs the same GPUs at the same time.
        """
        return await self._in_writer(lambda: self._reserve(window, machine_gpus))

    def _reserve(self, window: Window, machine_gpus: int) -> Window:
        with self._store.write() as tx:
            at = self._clock.now()
            others = _remove_past(tx, at)
            spans = self._checked_spans(window, at)
            clash = find_clash(
                window, spans, [(each, self._spans(each, at)) for each in others], machine_gpus
            )
            if clash is not None:
                raise self._clash(*clash, at)
            return tx.add_window(replace(window, name=_free_name(window, others)))

    async def cancel(self, name: str) -> Window:
        """Remove the window with this name or id, and return it.

        Raises:
            NoSuchWindow: there is none.
        """

        def remove() -> Window:
            with self._store.write() as tx:
                for window in _remove_past(tx, self._clock.now()):
                    if name in (window.name, str(window.id)):
                        tx.remove_window(window.id)
                        return window
            raise NoSuchWindow(
                f"no window named {name[:80]!r}", "gpulease reserve --list shows all windows"
            )

        return await self._in_writer(remove)

    def current(self, at: datetime, owners: Iterable[Owner]) -> tuple[Occurrence, ...]:
        """Return the current or next time of each window; `owners` are those of the live jobs."""
        return self.occurrences(self._store.windows(), at, owners)

    def occurrences(
        self, windows: Iterable[Window], at: datetime, owners: Iterable[Owner] = ()
    ) -> tuple[Occurrence, ...]:
        """Return the current or next time of these windows, without those that have ended."""
        found = []
        for window in windows:
            span = self._current_span(window, at)
            if span is not None:
                begin, end = (self._local_time.text(each, at) for each in span)
                admits = frozenset(each.user for each in owners if self._admits(window, each, at))
                found.append(Occurrence(window, *span, admits, begin, end))
        return tuple(found)

    def _current_span(self, window: Window, at: datetime) -> Span | None:
        # Each pass asks, and to compute the times of a rare event takes milliseconds.
        found_at, span = self._current.get(window.id, (at, None))
        if window.cron is None or span is None or not found_at <= at < span[1]:
            span = next(window.spans(at, self._local_time.next), None)
            if span is not None:
                self._current[window.id] = at, span
        return span

    def _admits(self, window: Window, owner: Owner, at: datetime) -> bool:
        if owner.user in window.users:
            return True
        if not window.groups:
            return False
        if self._forget_groups_at is None or self._forget_groups_at <= at:
            self._groups.clear()
            self._forget_groups_at = at + _LOOK_UP_AGAIN_AFTER
        groups = self._groups.get(owner)
        if groups is None:
            groups = self._groups[owner] = self._groups_of(owner)
        return not set(window.groups).isdisjoint(groups)

    def _checked_spans(self, window: Window, at: datetime) -> Sequence[Span]:
        spans = self._spans(window, at)
        if not spans:
            why = "it ends in the past" if window.cron is None else "its times never come"
            raise BadValue(f"cannot reserve GPUs: {why}", "gpulease reserve --help has examples")
        # A day may have 23 hours, and a window all day, every day, is no mistake.
        if any(later[0] + _CHANGE_OF_CLOCKS < each[1] for each, later in pairwise(spans)):
            raise BadValue(
                "cannot reserve GPUs: the window lasts until after its next begin",
                "make --for shorter, or --every rarer",
            )
        return spans

    def _spans(self, window: Window, at: datetime) -> Sequence[Span]:
        found = islice(window.spans(at, self._local_time.next), _MOST_COMPARED)
        soon = takewhile(lambda span: span[0] < at + _COMPARE_FOR, found)
        return list(soon) or list(islice(window.spans(at, self._local_time.next), 1))

    def _clash(self, other: Window, begin: datetime, at: datetime) -> WindowClash:
        return WindowClash(
            f"cannot reserve GPUs: window {other.name} needs them too at "
            f"{self._local_time.text(begin, at)}",
            "gpulease reserve --list shows all windows; "
            f"gpulease reserve --cancel {other.name} removes that one",
        )


def _remove_past(tx: Transaction, at: datetime) -> Sequence[Window]:
    """Remove the windows that have ended, and return the others."""
    windows = tx.windows()
    for window in windows:
        if window.is_over(at):
            tx.remove_window(window.id)
    return [window for window in windows if not window.is_over(at)]


def _free_name(window: Window, others: Sequence[Window]) -> str:
    """Return the name of a window, by default that of its first user or group.

    Raises:
        WindowClash: another window has it.
    """
    taken = {each.name for each in others}
    if window.name in taken:
        raise WindowClash(
            f"cannot reserve GPUs: there is a window named {window.name!r}",
            f"use another --name, or remove that one: gpulease reserve --cancel {window.name}",
        )
    base = next(iter((*window.users, *window.groups)), "maintenance")
    numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
    return window.name or next(each for each in (base, *numbered) if each not in taken)
