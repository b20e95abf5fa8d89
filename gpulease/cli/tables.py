"""Tables that fit: what is left out and what is shortened when a terminal is narrow.

Drawing is elsewhere; this only decides, for plain text and for a coloured terminal alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpulease.cli.text import cells, shorten

GAP = 2
"""Columns between two columns."""

Style = Literal["", "title", "good", "warn", "bad", "dim", "lease", "promise", "stranger", "room"]


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
class Column:
    """A title, and what may happen to the column when there is no room."""

    title: str
    right: bool = False
    leaves: int = 0
    """The highest number leaves first; 0 stays whatever happens."""
    shrinks: bool = False
    least: int = 8
    """To how little it may shrink."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under titles."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Line, ...], ...]

    def widths(self) -> list[int]:
        """Return what each column needs."""
        titles = [cells(column.title) for column in self.columns]
        for row in self.rows:
            titles = [
                max(width, cells(text_of(cell))) for width, cell in zip(titles, row, strict=True)
            ]
        return titles


Block = Line | Table
Page = Sequence[Block]


def fit(table: Table, width: int | None) -> Table:
    """Return `table` in at most `width` columns of a terminal; None is as wide as it likes."""
    if width is None:
        return table
    while _excess(table, width) > 0:
        leaving = max(table.columns, key=lambda column: column.leaves)
        if _excess(_shrunk(table, width), width) <= 0 or not leaving.leaves:
            return _shrunk(table, width)
        table = _without(table, table.columns.index(leaving))
    return table


def _excess(table: Table, width: int) -> int:
    widths = table.widths()
    return sum(widths) + GAP * (len(widths) - 1) - width


def _shrunk(table: Table, width: int) -> Table:
    for number, column in enumerate(table.columns):
        excess = _excess(table, width)
        if column.shrinks and excess > 0:
            room = max(table.widths()[number] - excess, column.least, cells(column.title))
            rows = (_with_short_cell(row, number, room) for row in table.rows)
            table = replace(table, rows=tuple(rows))
    return table


def _with_short_cell(row: tuple[Line, ...], number: int, room: int) -> tuple[Line, ...]:
    cell = row[number]
    if cells(text_of(cell)) <= room:
        return row
    style = cell[0].style
    return (*row[:number], line(shorten(text_of(cell), room), style), *row[number + 1 :])


def _without(table: Table, number: int) -> Table:
    return Table(
        columns=table.columns[:number] + table.columns[number + 1 :],
        rows=tuple(row[:number] + row[number + 1 :] for row in table.rows),
    )


def plain(page: Page, width: int | None) -> str:
    """Return a page as plain text, each line within `width`, with a line's end after each."""
    written: list[str] = []
    for block in page:
        if isinstance(block, Table):
            written += _plain_table(fit(block, width))
        else:
            text = text_of(block)
            written.append(text if width is None else shorten(text, width))
    return "".join(text + "\n" for text in written)


def _plain_table(table: Table) -> list[str]:
    widths = table.widths()
    titles = tuple(line(column.title) for column in table.columns)
    return [_plain_row(table, row, widths) for row in (titles, *table.rows)]


def _plain_row(table: Table, row: tuple[Line, ...], widths: list[int]) -> str:
    padded = []
    for column, cell, width in zip(table.columns, row, widths, strict=True):
        text = text_of(cell)
        space = " " * (width - cells(text))
        padded.append(space + text if column.right else text + space)
    return (" " * GAP).join(padded).rstrip()
