"""Lay out pages of lines and tables in the width of a terminal, or as wide as they are in a pipe.

In a narrow terminal the columns that matter least leave the table: their cells go below their rows
or are left out. Of the others some wrap and some are cut short. rich's tables can do neither, and
draw 10,000 rows in several seconds.
"""

from __future__ import annotations

from gpulease.drawing.words import UNKNOWN, display_width, shorten, shorten_middle, truncate
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Literal, NamedTuple

    Style = Literal[
        "", "title", "heading", "good", "warn", "bad", "dim",
        "used", "leased", "unmanaged", "free", "exclusive", "closed",
        "owner0", "owner1", "owner2", "owner3", "owner4", "owner5", "owner6", "owner7",
    ]  # fmt: skip

_GAP = "  "
_NOTE_INDENT = 4
_CONTINUATION_INDENT = 2
_SHORT_NAME = 12
"""What is cut in the middle becomes as narrow as this before it leaves."""

COLOURS: dict[Style, str] = {
    # In the order of `wire.text.USER_COLOURS`.
    "owner0": "94",
    "owner1": "33",
    "owner2": "32",
    "owner3": "35",
    "owner4": "36",
    "owner5": "95",
    "owner6": "93",
    "owner7": "34",
    "title": "1",
    "heading": "1;2",
    "good": "32",
    "warn": "33",
    "bad": "31",
    "dim": "2",
    "used": "36",
    "leased": "34",
    "unmanaged": "31",
    "free": "2",
    "exclusive": "35",
    "closed": "2",
}
"""Parameters of the escape sequence SGR (ECMA-48)."""


if TYPE_CHECKING:

    class Span(NamedTuple):
        """A piece of text in one style."""

        text: str
        style: Style = ""

else:
    Style = str

    def Span(text, style=""):  # noqa: N802  a table has a hundred thousand of them
        return (text, style)


Line = tuple[Span, ...]


def line(text: str, style: Style = "") -> Line:
    """Return a line, or a cell, of one style."""
    return (Span(text, style),)


@record(frozen=True)
class Hanging:
    """A line whose continuation begins `indent` columns from the left."""

    line: Line
    indent: int


@record(frozen=True)
class Column:
    """A title, and what happens to the column in a narrow terminal."""

    title: str
    right: bool = False
    leaves: int = 0
    """The column with the highest number leaves first; one with 0 always stays."""
    below: str | None = None
    """When the column leaves, its cells go below their rows after this text; None: nowhere."""
    shrinks: bool = False
    """Its cells are cut short."""
    cuts: Literal["end", "middle", "parts"] = "end"
    """Where they are cut; names that differ at their end are cut in the middle.

    Of "parts", each a span, the last ones are left out whole.
    """
    wraps: bool = False
    """Its cells take several lines, before another column shrinks."""
    narrows_first: bool = False
    """It shrinks or wraps before the others."""
    least: int = 8
    """The width that it keeps when it shrinks or wraps."""


@record(frozen=True)
class Table:
    """Rows of cells under titles."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Line, ...], ...]


Block = Line | Hanging | Table
if TYPE_CHECKING:
    Page = Sequence[Block]
else:
    Page = tuple


def draw(page: Page, width: int | None, *, colour: bool = False) -> str:
    """Return a page as text, its lines at most `width` columns wide where possible."""
    paint = _coloured if colour else _plain
    lines = (drawn for block in page for drawn in _block(block, width, paint))
    return "".join(f"{drawn.rstrip(' ')}\n" for drawn in lines)


def widths(table: Table, width: int | None) -> dict[int, int]:
    """Return the width of each column, by its number, that stays in a table of that width."""
    return _kept(table.columns, [taken for _, taken in _measured(table)], width)


def _measured(table: Table) -> list[tuple[list[str], list[int]]]:
    """Return the texts of each column, its title first, and the widths that they take."""
    columns = []
    for number, column in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        texts = [column.title, *[cell[0][0] if len(cell) == 1 else _plain(cell) for cell in cells]]
        width_of = len if "".join(texts).isascii() else display_width
        columns.append((texts, list(map(width_of, texts))))
    return columns


def _kept(
    columns: Sequence[Column], taken: Sequence[Sequence[int]], width: int | None
) -> dict[int, int]:
    found = {number: max(each) for number, each in enumerate(taken)}
    while width is not None and _excess(found, width) > 0:
        narrowed = _narrowed(columns, found, width)
        leaving = max(found, key=lambda number: (columns[number].leaves, -number))
        if _excess(narrowed, width) <= 0 or not columns[leaving].leaves:
            return narrowed
        if columns[leaving].cuts == "middle":
            narrowed = _narrowed(columns, found, width, _SHORT_NAME)
            if _excess(narrowed, width) <= 0:
                return narrowed
        del found[leaving]
    return found


def _excess(widths: dict[int, int], width: int) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1) - width


def _narrowed(
    columns: Sequence[Column], widths: dict[int, int], width: int, least_name: int | None = None
) -> dict[int, int]:
    narrowed = dict(widths)
    order = [(not each.narrows_first, not each.wraps) for each in columns]
    for number in sorted(widths, key=order.__getitem__):
        column, excess = columns[number], _excess(narrowed, width)
        if excess > 0 and (column.wraps or column.shrinks):
            least = column.least if column.cuts != "middle" else least_name or column.least
            least = max(least, display_width(column.title))
            narrowed[number] = min(widths[number], max(widths[number] - excess, least))
    return narrowed


def wrap(spans: Line, width: int | None, indent: int = 0) -> list[Line]:
    """Return `spans` in lines of at most `width` columns, all but the first indented."""
    if width is None or display_width(_plain(spans)) <= width:
        return [spans]
    indent = min(indent, width // 2)
    first, *rest = (
        _cut(spans, begin, end) for begin, end in line_breaks(_plain(spans), width, width - indent)
    )
    return [first, *((Span(" " * indent), *piece) for piece in rest)]


def line_breaks(text: str, width: int, later: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield where each line of `text` begins and ends, between words where possible.

    The first line is `width` columns wide, the others `later`, or as wide.
    """
    begin = 0
    while display_width(text[begin:]) > width:
        end = begin + max(1, len(truncate(text[begin:], width)))
        space = text.rfind(" ", begin, end + 1)
        if space > begin and text[begin:space].strip():
            end = space
        yield begin, end
        begin = end + len(text[end:]) - len(text[end:].lstrip(" "))
        width = width if later is None else later
    if begin < len(text) or not text:
        yield begin, len(text)


def _cut(spans: Line, begin: int, end: int) -> Line:
    pieces = []
    for text, style in spans:
        if piece := text[max(0, begin) : max(0, end)]:
            pieces.append(Span(piece, style))
        begin, end = begin - len(text), end - len(text)
    return tuple(pieces)


def _block(block: Block, width: int | None, paint: Callable[[Line], str]) -> Iterable[str]:
    if isinstance(block, Table):
        return _table(block, width, paint)
    if isinstance(block, Hanging):
        return map(paint, wrap(block.line, width, block.indent))
    return map(paint, wrap(block, width, _CONTINUATION_INDENT))


def _table(table: Table, width: int | None, paint: Callable[[Line], str]) -> Iterator[str]:
    """Yield the titles and the rows, with the columns for which there is room."""
    measured = _measured(table)
    kept = _kept(table.columns, [taken for _, taken in measured], width)
    # The column that matters least is the last to be noted.
    below = [number for number in range(len(table.columns)) if number not in kept]
    below.sort(key=lambda number: -table.columns[number].leaves)
    titles = tuple(line(column.title, "heading") for column in table.columns)
    rows = (titles, *table.rows)
    drawn = []
    for number, each in kept.items():
        cells = [row[number] for row in rows]
        drawn.append(_column(table.columns[number], cells, *measured[number], each, paint))
    longer = {place for _, rest in drawn for place in rest}
    for place, row in enumerate(zip(*[firsts for firsts, _ in drawn], strict=True)):
        yield _GAP.join(row)
        if place in longer:
            yield from _continued([rest.get(place, ()) for _, rest in drawn], kept)
        if place and below and (note := _note(table.columns, rows[place], below)):
            indented = (Span(" " * _NOTE_INDENT), *note)
            yield from map(paint, wrap(indented, width, _NOTE_INDENT))


def _column(
    column: Column,
    cells: Sequence[Line],
    texts: list[str],
    taken: list[int],
    width: int,
    paint: Callable[[Line], str],
) -> tuple[list[str], dict[int, list[str]]]:
    """Draw the cells of a column; return the first line of each, and the others of those with more.

    By column, a list of ten thousand jobs takes half as long as cell by cell.
    """
    pairs = zip(texts if paint is _plain else map(paint, cells), taken, strict=True)
    if column.right:
        firsts = [" " * (width - each) + text for text, each in pairs]
    else:
        firsts = [text + " " * (width - each) for text, each in pairs]
    rest: dict[int, list[str]] = {}
    for place in [place for place, each in enumerate(taken) if each > width]:
        pieces = _fitted(column, cells[place], width)
        firsts[place], *others = (
            paint(piece) + " " * (width - display_width(_plain(piece))) for piece in pieces
        )
        if others:
            rest[place] = others
    return firsts, rest


def _continued(cells: Sequence[Sequence[str]], kept: dict[int, int]) -> Iterator[str]:
    """Yield the second and later lines of a row."""
    for number in range(max(map(len, cells))):
        yield _GAP.join(
            cell[number] if number < len(cell) else " " * width
            for cell, width in zip(cells, kept.values(), strict=True)
        )


def _fitted(column: Column, cell: Line, width: int) -> list[Line]:
    """Return the lines of a cell that is wider than its column."""
    if column.wraps:
        return wrap(cell, width)
    if column.cuts == "parts":
        return [_first_parts(cell, width)]
    cut = shorten if column.cuts == "end" else shorten_middle
    return [line(cut(_plain(cell), width), cell[0][1])]


def _first_parts(cell: Line, width: int) -> Line:
    """Return the parts that fit; a single one is cut between words."""
    while len(cell) > 1 and display_width(_plain(cell)) > width:
        cell = cell[:-1]
    text, style = _plain(cell), cell[0][1]
    if display_width(text) <= width:
        return cell
    _, end = next(line_breaks(text, width - 1))
    return line(text[:end] + "…", style)


def _note(columns: Sequence[Column], row: Sequence[Line], below: Sequence[int]) -> Line:
    """Return what stands below a row: the cells of the columns that have left."""
    note: list[Span] = []
    for number in below:
        label = columns[number].below
        if label is not None and _plain(row[number]) not in ("", UNKNOWN):
            note += [Span("; ", "dim")] * bool(note)
            note += [Span(label, "dim")] * bool(label)
            note += row[number]
    return tuple(note)


def _plain(spans: Line) -> str:
    return spans[0][0] if len(spans) == 1 else "".join([text for text, _ in spans])


def _coloured(spans: Line) -> str:
    return "".join(
        [
            f"\033[{COLOURS[style]}m{text}\033[0m" if style and text else text
            for text, style in spans
        ]
    )
