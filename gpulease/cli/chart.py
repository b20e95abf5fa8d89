"""Draw memory over time with block characters, or with ASCII, in a given width and height.

Pure: the time zone is an argument. No library draws it: plotext cannot leave gaps for unknown
values, has no plain ASCII, and its versions 5 and 6 have different interfaces.
"""

from __future__ import annotations

from datetime import datetime, tzinfo
from itertools import groupby
from math import ceil

from gpulease.cli.tables import Span, draw, wrap
from gpulease.drawing.axes import size_step, time_marks
from gpulease.drawing.words import display_width, shorten
from gpulease.record import record
from gpulease.units import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpulease.cli.tables import Line, Style

    _Drawn = tuple["Layer", Sequence[int | None]]
    """A layer, and the height of each of its columns in eighths of a row."""

_EIGHTHS = "▁▂▃▄▅▆▇█"
_LEAST_ROWS = 3
_LEAST_COLUMNS = 10
_ROWS_A_TICK = 3
_COLUMNS_A_LABEL = 12
_UNKNOWN = "?"


@record(frozen=True)
class Layer:
    """An area from zero up to the values of a series; those that come later cover it."""

    name: str
    values: Sequence[int | None]
    """Bytes, one for each step of time; None is unknown, and leaves a gap."""
    style: Style
    block: str
    """The character that fills it; █ alone has parts, which make the upper edge finer."""
    letter: str
    """The same in ASCII."""
    averages: bool = False
    """Whether values that share a column are drawn as their mean, or as the largest of them."""


@record(frozen=True)
class Limit:
    """A horizontal line."""

    name: str
    value: int


@record(frozen=True)
class Times:
    """When the values of a chart were: value `i` is `i` steps after `begins_at`."""

    begins_at: datetime
    step: float
    """Seconds."""
    zone: tzinfo | None = None
    """None: the local time zone."""


@record(frozen=True)
class Chart:
    """One chart, with the text above it and below it."""

    head: Line
    layers: Sequence[Layer]
    limit: Limit | None
    times: Times
    below: Sequence[str]


def memory_chart(
    layers: Sequence[Layer],
    limit: Limit | None,
    times: Times,
    *,
    width: int,
    height: int,
    colour: bool = False,
    blocks: bool = True,
    legend: bool = True,
) -> str:
    """Return a chart as text: `height` lines of at most `width` columns, and those of the legend.

    Where several values share a column, the layer says what is drawn. `blocks` says that the
    terminal can show block characters; without them the chart is ASCII.
    """
    lines = [*_chart(layers, limit, times, width, height, blocks=blocks)]
    if legend:
        lines += wrap(_legend(layers, limit, blocks=blocks), width)
    return draw(lines, None, colour=colour)


def _chart(
    layers: Sequence[Layer],
    limit: Limit | None,
    times: Times,
    width: int,
    height: int,
    *,
    blocks: bool,
) -> Iterator[Line]:
    rows = max(_LEAST_ROWS, height - 2)
    labels, top = _scale(_largest(layers, limit), None if limit is None else limit.value, rows)
    margin = max(map(display_width, labels.values()))
    columns = max(_LEAST_COLUMNS, width - margin - 1)
    drawn = [
        (layer, [_eighths(each, top, rows) for each in _columns(layer, columns)])
        for layer in layers
    ]
    line_row = None if limit is None else min(rows - 1, ceil(limit.value * rows / top))
    tick, wall, rule = ("┤", "│", "─") if blocks else ("+", "|", "-")
    for row in reversed(range(rows)):
        label = labels.get(row)
        yield (
            Span(f"{label or '':>{margin}}{tick if label else wall}", "dim"),
            *_row(drawn, row, columns, rule if row == line_row else " ", blocks=blocks),
        )
    yield from _time_axis(times, max(len(each.values) for each in layers), margin, columns, blocks)


def _largest(layers: Sequence[Layer], limit: Limit | None) -> int:
    known = [value for layer in layers for value in layer.values if value is not None]
    return max([*known, 1 if limit is None else limit.value, 1])


def _scale(largest: int, limit: int | None, rows: int) -> tuple[dict[int, str], float]:
    """Return the labels of the rows and the value at the upper end of the chart.

    The line of a limit takes the row above it, so that what is within the limit stays below it.
    """
    top = largest * rows / (rows - 1) if limit == largest else float(largest)
    ticks = range(0, int(top) + 1, size_step(top, max(1, rows // _ROWS_A_TICK)))
    labels = {int(value * rows / top): format_size(value) for value in ticks}
    if limit is not None:
        row = min(rows - 1, ceil(limit * rows / top))
        labels = {each: text for each, text in labels.items() if abs(each - row) > 1}
        labels[row] = format_size(limit)
    return {**labels, 0: "0"}, top


def _columns(layer: Layer, columns: int) -> Iterator[float | None]:
    """Yield the value of each column; with fewer values than columns, they repeat."""
    values = layer.values
    count = len(values)
    for column in range(columns):
        begin = column * count // columns
        some = values[begin : max(begin + 1, (column + 1) * count // columns)]
        known = [each for each in some if each is not None]
        if layer.averages and known:
            yield sum(known) / len(known)
        else:
            yield max(known, default=None)


def _eighths(value: float | None, top: float, rows: int) -> int | None:
    """Return the height of a value in eighths of a row; a little is not nothing."""
    return None if value is None else ceil(value * rows * 8 / top - 1e-6)


def _row(
    drawn: Sequence[_Drawn], row: int, columns: int, empty: str, *, blocks: bool
) -> Iterator[Span]:
    """Yield a row of the chart; neighbours of one style share a span."""
    cells = [_cell(drawn, row, column, empty, blocks=blocks) for column in range(columns)]
    for style, some in groupby(cells, lambda cell: cell[1]):
        yield Span("".join([text for text, _ in some]), style)


def _cell(
    drawn: Sequence[_Drawn], row: int, column: int, empty: str, *, blocks: bool
) -> tuple[str, Style]:
    if not row and all(heights[column] is None for _, heights in drawn):
        return _UNKNOWN, "dim"
    text = empty
    style: Style = "dim"
    for layer, heights in drawn:
        eighths = (heights[column] or 0) - 8 * row
        if mark := _mark(layer, eighths, is_free=style == "dim", blocks=blocks):
            text, style = mark, layer.style
    return text, style


def _mark(layer: Layer, eighths: int, *, is_free: bool, blocks: bool) -> str:
    """Return what a layer draws in a cell of which it fills some eighths; "" for nothing."""
    if eighths <= 0:
        return ""
    if blocks and layer.block == "█" and is_free:
        return _EIGHTHS[min(eighths, 8) - 1]
    if eighths >= 4:
        return layer.block if blocks else layer.letter
    return "_" if is_free and not blocks else ""


def _time_axis(times: Times, count: int, margin: int, columns: int, blocks: bool) -> Iterator[Line]:
    span = count * times.step
    axis, labels = ["─" if blocks else "-"] * columns, [" "] * columns
    end = -1
    for part, label in time_marks(times.begins_at, span, columns / _COLUMNS_A_LABEL, times.zone):
        column = int(part * columns)
        begin = min(max(0, column - len(label) // 2), columns - len(label))
        if begin > end and column < columns:
            axis[column] = "┬" if blocks else "+"
            labels[begin : begin + len(label)] = label
            end = begin + len(label)
    corner = "└" if blocks else "+"
    yield (Span(" " * margin + corner + "".join(axis), "dim"),)
    yield (Span(" " * (margin + 1) + "".join(labels), "dim"),)


def _legend(layers: Sequence[Layer], limit: Limit | None, *, blocks: bool) -> Line:
    spans: list[Span] = []
    for layer in layers:
        mark = layer.block if blocks else layer.letter
        spans += [Span(mark, layer.style), Span(f" {shorten(layer.name, 40)}   ")]
    if limit is not None:
        spans += [Span("─" if blocks else "-", "dim"), Span(f" {limit.name}   ")]
    cells = zip(*(layer.values for layer in layers), strict=True)
    if any(all(each is None for each in cell) for cell in cells):
        spans += [Span(_UNKNOWN, "dim"), Span(" unknown")]
    return tuple(spans)
