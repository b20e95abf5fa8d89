"""Styled text of `gpulease top`, columns that fit a width, and the widget that shows lines.

Textual's own widgets render and measure more than what changes twice a second needs, and write more
to the terminal. This one compares what it shows with what it should show, and repaints only lines
that differ, up to the last cell that differs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gpulease.cli.render import IN_ASCII
from gpulease.cli.tables import COLOURS
from gpulease.drawing.words import display_width, shorten, shorten_middle, truncate

Span = tuple[str, str]
"""A text and the name of its style."""
Line = tuple[Span, ...]

_GAP = 2


@dataclass(frozen=True)
class Terminal:
    """What the terminal can show."""

    colour: bool
    utf8: bool


def plain(line: Line) -> str:
    """Return a line without its styles."""
    return "".join([text for text, _ in line])


def width_of(line: Line) -> int:
    """Return how many cells a line takes."""
    return display_width(plain(line))


def ascii_only(text: str) -> str:
    """Return text in ASCII, with the marks of `status`, and ? for other characters."""
    if text.isascii():
        return text
    return text.translate(IN_ASCII).encode("ascii", "replace").decode()


def fitted(line: Line, width: int) -> Line:
    """Return a line in exactly `width` cells: cut at its end, or padded."""
    kept: list[Span] = []
    left = width
    for text, style in line:
        taken = display_width(text)
        if taken > left:
            text = truncate(text, left)  # noqa: PLW2901 -- the rest does not fit
            taken = display_width(text)
            kept.append((text, style))
            left -= taken
            break
        kept.append((text, style))
        left -= taken
    return (*kept, (" " * left, "")) if left > 0 else tuple(kept)


def apart(left: Line, right: Line, width: int) -> Line:
    """Return a line with one part at each end of `width`; without room for both, the left one."""
    space = width - width_of(left) - width_of(right)
    return (*left, (" " * space, ""), *right) if space >= _GAP else fitted(left, width)


def beside(left: Line, below: Line) -> Line:
    """Return a line over the beginning of another one, of which only whole words are left."""
    end, text = width_of(left) + _GAP, plain(below)
    while end < len(text) and text[end - 1] != " ":
        end += 1
    return (*left, (" " * (end - width_of(left)) + text[end:], "heading"))


@dataclass(frozen=True)
class Column:
    """A column of a listing."""

    title: str
    width: int
    """Cells; of a column that `grows`, the least; 0 leaves it out."""
    right: bool = False
    grows: int = 0
    """The share that it gets of what is left."""
    leaves: int = 0
    """In a narrow terminal the column with the highest number leaves first; 0 stays."""
    most: int = 1000
    """Cells at most, for a column that grows."""
    keeps_end: bool = False
    """Long cells are cut in their middle: names often differ at their ends."""


def widths(columns: Sequence[Column], width: int) -> list[int]:
    """Return the cells of each column in a listing of that width; 0 for one that has left."""
    kept = {number: column.width for number, column in enumerate(columns) if column.width}
    while (spare := width - sum(kept.values()) - _GAP * (len(kept) - 1)) < 0:
        leaving = max(kept, key=lambda number: (columns[number].leaves, number))
        if not columns[leaving].leaves:
            break
        del kept[leaving]
    growing = sorted((n for n in kept if columns[n].grows), key=lambda n: columns[n].most)
    for number in growing:
        shares = sum(columns[each].grows for each in growing[growing.index(number) :])
        more = min(max(0, spare) * columns[number].grows // shares, columns[number].most)
        kept[number] = min(kept[number] + more, max(columns[number].most, kept[number]))
        spare -= kept[number] - columns[number].width
    # Narrower still: a cell that is shortened ends in a mark, which one at the edge would not.
    while spare < 0 and kept[widest := max([*growing, max(kept)], key=kept.__getitem__)] > 1:
        kept[widest] -= 1
        spare += 1
    return [kept.get(number, 0) for number in range(len(columns))]


def row(columns: Sequence[Column], cells: Sequence[Span], taken: Sequence[int]) -> Line:
    """Return cells in columns of the given widths."""
    spans: list[Span] = []
    for column, (text, style), width in zip(columns, cells, taken, strict=True):
        if not width:
            continue
        short = shorten_middle(text, width) if column.keeps_end else shorten(text, width)
        padding = " " * (width - display_width(short))
        spans += (
            [(padding, ""), (short, style)] if column.right else [(short, style), (padding, "")]
        )
        spans.append((" " * _GAP, ""))
    return tuple(span for span in spans[:-1] if span[0])


_STYLES = {
    "title": Style(bold=True),
    "heading": Style(bold=True, dim=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red"),
    "used": Style(color="cyan"),
    "leased": Style(color="blue"),
    "unmanaged": Style(color="red"),
    "free": Style(dim=True),
    "closed": Style(dim=True),
    "cursor": Style(reverse=True),
    "keys": Style(reverse=True),
}
_STYLES |= {
    # SGR 30 to 37 are the colours 0 to 7, and 90 to 97 the bright ones, 8 to 15.
    name: Style(color=f"color({int(code) % 10 + 8 * (code >= '9')})")
    for name, code in COLOURS.items()
    if name.startswith("owner")
}
_STYLES |= {
    f"{name}-name": style + Style(bold=True)
    for name, style in _STYLES.items()
    if name.startswith("owner") or name == "used"
}
_PLAIN_STYLES = {
    name: Style(bold=style.bold, dim=style.dim, reverse=style.reverse)
    for name, style in _STYLES.items()
}


class Lines(Widget):
    """Shows lines, cut or padded to its width."""

    DEFAULT_CSS = "Lines { height: 1; }"
    EMPTY: Line = ()

    def __init__(self, terminal: Terminal, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._terminal = terminal
        self._lines: list[Line] = []
        self._strips: dict[int, Strip] = {}
        self._palette = _STYLES if terminal.colour else _PLAIN_STYLES

    @property
    def lines(self) -> list[str]:
        """What is shown, without styles."""
        return [plain(line) for line in self._lines]

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines, and repaint what differs from those before."""
        before, self._lines = self._lines, list(lines)
        width = self.size.width
        regions = []
        for y in range(max(len(before), len(self._lines))):
            old = before[y] if y < len(before) else self.EMPTY
            new = self._lines[y] if y < len(self._lines) else self.EMPTY
            if old != new:
                self._strips.pop(y, None)
                regions.append(Region(0, y, min(width, last_difference(old, new)), 1))
        if regions:
            self.refresh(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of some lines; Textual calls this for what has to be painted."""
        return [
            self._strip(y).crop(crop.x, crop.x + crop.width)
            for y in range(crop.y, crop.y + crop.height)
        ]

    def _strip(self, y: int) -> Strip:
        width = self.size.width
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != width:
            line = fitted(self._lines[y] if y < len(self._lines) else self.EMPTY, width)
            shown = str if self._terminal.utf8 else ascii_only
            segments = [Segment(shown(text), self._palette.get(style)) for text, style in line]
            strip = self._strips[y] = Strip(segments, width)
        return strip


def last_difference(one: Line, other: Line) -> int:
    """Return the column after which two lines are equal."""
    ends = width_of(one), width_of(other)
    if ends[0] != ends[1]:
        return max(ends)
    end = ends[0]
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        end -= width_of((left,))
    return end


_SGR = re.compile(r"\x1b\[([0-9;]*)m")
_BY_CODE = {code: name for name, code in COLOURS.items()}


def styled(text: str) -> list[Line]:
    """Return the lines of a page that `tables.draw` has coloured."""
    return [_styled_line(line) for line in text.splitlines()]


def _styled_line(line: str) -> Line:
    first, *rest = _SGR.split(line)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    spans = ((first, ""), *((piece, _BY_CODE.get(code, "")) for code, piece in pairs))
    return tuple(span for span in spans if span[0])
