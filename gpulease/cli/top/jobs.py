"""The listing of jobs, strangers and the queue: the visible rows, and the selected one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.message import Message

from gpulease.cli.top.lines import Line, Lines, Terminal, beside, fitted, plain
from gpulease.cli.top.rows import Listing
from gpulease.cli.top.sections import Item, Section, Sort, count_of, key_of
from gpulease.drawing.words import clean

_WHEEL = 3
"""Rows for each step of the wheel."""


@dataclass(frozen=True)
class _Row:
    section: Section
    item: Item | None
    """None: a line above the rows."""
    is_title: bool = False


class Jobs(Lines, can_focus=True):
    """Shows sections of rows, of which one row is selected."""

    DEFAULT_CSS = "Jobs { height: 1fr; width: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Moved(Message):
        """Another row was selected by a key."""

    class Clicked(Message):
        """A row was clicked."""

        def __init__(self, jobs: "Jobs") -> None:
            super().__init__()
            self.jobs = jobs

    class Left(Message):
        """A key went past the first or the last row."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    class Opened(Message):
        """A row was opened."""

        def __init__(self, item: Item) -> None:
            super().__init__()
            self.item = item

    def __init__(self, terminal: Terminal, *, id: str) -> None:
        super().__init__(terminal, id=id)
        self._rows: list[_Row] = []
        self._items: list[int] = []
        """Where in `_rows` the items are."""
        self._selected = 0
        """A number of `_items`."""
        self._offset = 0
        """The first row on the screen."""
        self._clicked: object = None
        """The key of the row that was clicked last."""
        self._sections: Sequence[Section] = ()
        self._labels: Mapping[str, str] = {}
        self._order = Sort()
        self._now: datetime | None = None
        self.is_small = False
        """Whether a section has its title and those of its columns in one line."""

    @property
    def _head(self) -> int:
        """Lines above the rows of a section: its title, and the titles of its columns."""
        return 1 if self.is_small else 2

    @property
    def selected(self) -> Item | None:
        """The selected row."""
        return self._rows[self._items[self._selected]].item if self._items else None

    def show_sections(
        self, sections: Sequence[Section], labels: Mapping[str, str], order: Sort, now: datetime
    ) -> None:
        """Show these sections; the selected row stays selected, wherever it is now."""
        before = None if self.selected is None else key_of(self.selected)
        self._sections, self._labels, self._order, self._now = sections, labels, order, now
        self._rows = [row for section in sections for row in _rows(section, self._head)]
        self._items = [place for place, row in enumerate(self._rows) if row.item is not None]
        keys = [key_of(item) for place in self._items if (item := self._rows[place].item)]
        if before in keys:
            self._selected = keys.index(before)
        self._select(self._selected)

    @property
    def is_near_end(self) -> bool:
        """Whether the last rows are on the screen, or soon will be."""
        return self._offset + 2 * self.size.height >= len(self._rows)

    def action_move(self, by: int) -> None:
        """Select another row."""
        if abs(by) == 1 and not 0 <= self._selected + by < len(self._items):
            self.post_message(self.Left(by))
        self._select(self._selected + by)
        self.post_message(self.Moved())

    def action_page(self, by: int) -> None:
        """Select a row a screen further."""
        self.action_move(by * max(1, self.size.height - self._head - 1))

    def action_open(self) -> None:
        """Open the selected row."""
        if (item := self.selected) is not None:
            self.post_message(self.Opened(item))

    def on_click(self, event: Click) -> None:
        """Select the row under the mouse; open it at the second click, however late that comes."""
        rows = self._rows[self._offset :]
        row = rows[event.y] if event.y < len(rows) else None
        is_covered = self._offset and event.y < self._head
        if row is None or row.item is None or is_covered:
            return
        # Not by event.chain: on a busy machine the halves of a double click are read too far apart.
        if self.has_focus and row.item is self.selected and key_of(row.item) == self._clicked:
            self.action_open()
            return
        self._clicked = key_of(row.item)
        self.post_message(self.Clicked(self))
        self._select(self._items.index(self._offset + event.y))

    def on_mouse_scroll_down(self) -> None:
        """Go on by some rows."""
        self._select(self._selected + _WHEEL)
        self.post_message(self.Moved())

    def on_mouse_scroll_up(self) -> None:
        """Go back by some rows."""
        self._select(self._selected - _WHEEL)
        self.post_message(self.Moved())

    def on_resize(self, _event: Resize) -> None:
        """Draw for the new size."""
        self._select(self._selected)

    def on_focus(self) -> None:
        """Mark the selected row."""
        self._draw()

    def on_blur(self) -> None:
        """Take the mark away."""
        self._draw()

    def _select(self, number: int) -> None:
        self._selected = max(0, min(number, len(self._items) - 1))
        place = self._items[self._selected] if self._items else 0
        height = max(1, self.size.height)
        # The row below the sticky head is the first that can be seen, but for the first section.
        first = place - self._head if self._selected else 0
        self._offset = min(self._offset, max(0, first))
        self._offset = max(self._offset, place - height + 1)
        self._offset = max(0, min(self._offset, len(self._rows) - height))
        self._draw()

    def _draw(self) -> None:
        if self._now is None or not self.size.width:
            return
        shown = self._rows[self._offset : self._offset + self.size.height]
        if self._offset and shown:
            section = shown[min(self._head, len(shown)) - 1].section
            shown[: self._head] = _rows(section, self._head)[: min(self._head, len(shown))]
        width, now = self.size.width, self._now
        listings = {
            section.kind: Listing(section, width, self._labels, now)
            for section in {id(row.section): row.section for row in shown}.values()
        }
        selected = self.selected if self.has_focus else None
        self.show([self._line(row, listings[row.section.kind], selected) for row in shown])

    def _title(self, section: Section) -> Line:
        """Return the title of a section, and what of it is below the last line."""
        below = self._rows[self._offset + self.size.height :]
        jobs = count_of(row.item for row in below if row.section is section and row.item)
        # How many of those that the daemon was not asked for match a filter is unknown.
        jobs += 0 if section.left_out else section.more
        more = f"  {jobs} more below" if jobs else ""
        titles = [row.section.title for row in below if row.is_title]
        hides = section.left_out or section.wanted.text or section.wanted.user or section.wanted.gpu
        is_first = self._rows and section is self._rows[0].section
        only = f"  only {clean(str(section.wanted))}; Esc shows all" if hides and is_first else ""
        return (
            (section.title, "title"),
            (only, "warn"),
            (more, "dim"),
            *((f"  {title}", "dim") for title in titles),
        )

    def _line(self, row: _Row, listing: Listing, selected: Item | None) -> Line:
        if row.is_title:
            title = self._title(row.section)
            return beside(title, listing.heading(self._order)) if self.is_small else title
        if row.item is None:
            return listing.heading(self._order)
        drawn = listing.line(row.item)
        if selected is not None and key_of(row.item) == key_of(selected):
            return ((plain(fitted(drawn, self.size.width)), "cursor"),)
        return drawn


def _rows(section: Section, head: int) -> list[_Row]:
    above = (_Row(section, None, is_title=True), _Row(section, None))
    return [*above[: head if section.items else 1], *(_Row(section, it) for it in section.items)]


def lines_of(sections: Iterable[Section]) -> int:
    """Return the lines that sections take in full."""
    return sum(len(_rows(section, 2)) for section in sections)
