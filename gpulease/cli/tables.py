"""Tables that fit: what goes below its row, is left out or is shortened in a narrow terminal.

Drawing is elsewhere; this only decides, for plain text and for a coloured terminal alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpulease.cli.format import UNKNOWN, broken, cells, shorten

GAP = 2
"""Columns between two columns."""
_NOTE = 4
"""How far a note is indented below its row."""
_CONTINUED = 2
"""How far the rest of a line is indented that takes more than one."""

Style = Literal[
    "", "title", "heading", "good", "warn", "bad", "dim", "lease", "promise", "stranger", "room"
]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text in one style."""

    text: str
    style: Style = ""


Line = tuple[Span, ...]


def line(text: str, style: Style = "") -> Line:
    """Return a line, or a cell, of one style."""
    return (Span(text, style),)


def text_of(spans: Line) -> str:
    """Return a line without its styles."""
    return "".join(span.text for span in spans)


@dataclass(frozen=True, slots=True)
class Hanging:
    """A line whose continuation begins `indent` columns from the left."""

    line: Line
    indent: int


@dataclass(frozen=True, slots=True)
class Column:
    """A title, and what may happen to the column when there is no room."""

    title: str
    right: bool = False
    leaves: int = 0
    """The highest number leaves first; 0 stays whatever happens."""
    below: str | None = None
    """A column that leaves is written below its row, after this, rather than left out."""
    shrinks: bool = False
    """It is cut short."""
    wraps: bool = False
    """It takes several lines, before another shrinks."""
    least: int = 8
    """To how little it may shrink or wrap."""
    width: int | None = None
    """What it was narrowed to; its cells may be wider, and take several lines."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under titles, with what stands below each row."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Line, ...], ...]
    notes: tuple[Line, ...] = ()
    """None at all, or one for each row, which may be empty."""

    def widths(self) -> list[int]:
        """Return what each column needs."""
        return [self._width(number) for number in range(len(self.columns))]

    def _width(self, number: int) -> int:
        column = self.columns[number]
        needed = (cells(text_of(row[number])) for row in self.rows)
        return column.width or max(cells(column.title), max(needed, default=0))


Block = Line | Hanging | Table
Page = Sequence[Block]


def fit(table: Table, width: int | None) -> Table:
    """Return `table` in at most `width` columns of a terminal; None is as wide as it likes."""
    if width is None:
        return table
    while _excess(table, width) > 0:
        narrowed = _narrowed(table, width)
        leaving = max(table.columns, key=lambda column: column.leaves)
        if _excess(narrowed, width) <= 0 or not leaving.leaves:
            return narrowed
        table = _without(table, table.columns.index(leaving))
    return table


def _excess(table: Table, width: int) -> int:
    widths = table.widths()
    return sum(widths) + GAP * (len(widths) - 1) - width


def _narrowed(table: Table, width: int) -> Table:
    numbered = list(enumerate(table.columns))
    for number, column in sorted(numbered, key=lambda each: not each[1].wraps):
        excess = _excess(table, width)
        if excess <= 0 or not (column.wraps or column.shrinks):
            continue
        needed = table.widths()[number]
        room = min(needed, max(needed - excess, column.least, cells(column.title)))
        if column.wraps:
            table = _with_column(table, number, replace(column, width=room))
        else:
            rows = (_with_short_cell(row, number, room) for row in table.rows)
            table = replace(table, rows=tuple(rows))
    return table


def _with_column(table: Table, number: int, column: Column) -> Table:
    columns = (*table.columns[:number], column, *table.columns[number + 1 :])
    return replace(table, columns=columns)


def _with_short_cell(row: tuple[Line, ...], number: int, room: int) -> tuple[Line, ...]:
    cell = row[number]
    if cells(text_of(cell)) <= room:
        return row
    style = cell[0].style
    return (*row[:number], line(shorten(text_of(cell), room), style), *row[number + 1 :])


def _without(table: Table, number: int) -> Table:
    below = table.columns[number].below
    notes = table.notes or ((),) * len(table.rows)
    if below is not None:
        said = zip(notes, table.rows, strict=True)
        notes = tuple(_noted(note, below, row[number]) for note, row in said)
    return Table(
        columns=table.columns[:number] + table.columns[number + 1 :],
        rows=tuple(row[:number] + row[number + 1 :] for row in table.rows),
        notes=notes,
    )


def _noted(note: Line, below: str, cell: Line) -> Line:
    """Return `note` with what `cell` says after it."""
    if text_of(cell) in ("", UNKNOWN):
        return note
    said = (Span(below, "dim"), *cell) if below else cell
    return (*note, Span("; ", "dim"), *said) if note else said


def lay_out(page: Page, width: int | None) -> list[Line]:
    """Return the lines of a page, each at most `width` columns wide if that can be."""
    return [drawn for block in page for drawn in _block(block, width)]


def _block(block: Block, width: int | None) -> Iterator[Line]:
    match block:
        case Table():
            yield from _table(fit(block, width), width)
        case Hanging():
            yield from wrap(block.line, width, block.indent)
        case _:
            yield from wrap(block, width, _CONTINUED)


def wrap(spans: Line, width: int | None, indent: int = 0) -> list[Line]:
    """Return `spans` in lines of at most `width` columns, all but the first indented."""
    if width is None:
        return [spans]
    indent = min(indent, width // 2)
    places = list(broken(text_of(spans), width, width - indent))
    first, *rest = [_cut(spans, begin, end) for begin, end in places]
    return [first, *((Span(" " * indent), *piece) for piece in rest)]


def _cut(spans: Line, begin: int, end: int) -> Line:
    pieces = []
    for span in spans:
        piece = span.text[max(0, begin) : max(0, end)]
        if piece:
            pieces.append(Span(piece, span.style))
        begin, end = begin - len(span.text), end - len(span.text)
    return tuple(pieces)


def _table(table: Table, width: int | None) -> Iterator[Line]:
    widths = table.widths()
    yield from _row(table, tuple(line(each.title, "heading") for each in table.columns), widths)
    for number, row in enumerate(table.rows):
        yield from _row(table, row, widths)
        if table.notes and table.notes[number]:
            note = (Span(" " * _NOTE), *table.notes[number])
            yield from wrap(note, width, _NOTE)


def _row(table: Table, row: tuple[Line, ...], widths: list[int]) -> Iterator[Line]:
    pieces = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, pieces))):
        drawn: list[Span] = []
        for column, cell, width in zip(table.columns, pieces, widths, strict=True):
            piece = cell[number] if number < len(cell) else ()
            space = Span(" " * (width - cells(text_of(piece))))
            drawn += (space, *piece) if column.right else (*piece, space)
            drawn.append(Span(" " * GAP))
        yield _stripped(drawn)


def _stripped(spans: list[Span]) -> Line:
    while spans and not spans[-1].text.strip(" "):
        spans.pop()
    return tuple(span for span in spans if span.text)


def plain(page: Page, width: int | None) -> str:
    """Return a page as plain text, with a line's end after each line."""
    return "".join(text_of(drawn).rstrip() + "\n" for drawn in lay_out(page, width))
