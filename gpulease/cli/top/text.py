"""Styled text of `gpulease top`: lines, and columns that fit a width. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpulease.cli.render import IN_ASCII
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


@dataclass(frozen=True)
class Column:
    """A column of a listing."""

    title: str
    width: int
    """Cells; of a column that `grows`, the least."""
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
    kept = {number: column.width for number, column in enumerate(columns)}
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
