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
from gpulease.drawing.words import clean, display_width, shorten
from gpulease.record import record
from gpulease.units import format_size
from gpulease.wire.text import user_colour

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpulease.cli.tables import Line, Style

    _Drawn = tuple["Layer", Sequence[int | None]]
    """A layer, and the height of each of its columns in eighths of a row."""
    from collections.abc import Sequence

    from gpulease.wire.history import GpuHistoryView, JobGpuSeriesView

    Series = Sequence[int | None]


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
    known = [value for layer in layers for value in layer.values if value is not None]
    largest = max([*known, 1 if limit is None else limit.value, 1])
    labels, top = _scale(largest, None if limit is None else limit.value, rows)
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


OTHERS = "others"
NO_LEASE = "no lease"
_OWNERS: tuple[Style, ...] = (
    *("owner0", "owner1", "owner2", "owner3"),
    *("owner4", "owner5", "owner6", "owner7"),
)
_STYLES: dict[str, Style] = {OTHERS: "heading", NO_LEASE: "unmanaged"}


def owner_style(user: str) -> Style:
    """Return the style of a user: the same in every chart and bar."""
    return _OWNERS[user_colour(user)]


PEAK = "peak of use"


def on_average(view: GpuHistoryView | JobGpuSeriesView, name: str) -> Series:
    """Return the means of a series; those of an older daemon are its largest values."""
    mean = view.means.get(name)
    found: Series = getattr(view, name) if mean is None else _rounded(mean.values)
    return found


def job_layers(gpu: JobGpuSeriesView) -> tuple[list[Layer], Limit]:
    """Return what a job held of one GPU, and of that what the pools of its frameworks used."""
    limit, used = Limit("lease", gpu.leased), on_average(gpu, "used")
    peak = _peak(gpu, gpu.used)
    if all(each is None for each in gpu.pool):
        return [*peak, Layer("used", used, "used", "█", "#", averages=True)], limit
    return [
        *peak,
        Layer("held", used, "leased", "▒", "=", averages=True),
        Layer("in use by its framework", gpu.pool, "used", "█", "#"),
    ], limit


def gpu_layers(gpu: GpuHistoryView) -> list[Layer]:
    """Return, each above the next: memory used without a lease, leased but unused, and used."""
    unmanaged = on_average(gpu, "unmanaged")
    used = [_less(*each) for each in zip(on_average(gpu, "used"), unmanaged, strict=True)]
    peak = [_less(*each) for each in zip(gpu.used, gpu.unmanaged, strict=True)]
    # A job may use more than its lease.
    claimed = on_average(gpu, "committed"), on_average(gpu, "leased"), used
    leased = [_most(*each) for each in zip(*claimed, strict=True)]
    all_of_it = [_sum(*each) for each in zip(leased, unmanaged, strict=True)]
    return [
        Layer(NO_LEASE, _at_most(all_of_it, gpu.total), "unmanaged", "▚", "!", averages=True),
        Layer("leased", _at_most(leased, gpu.total), "leased", "▒", "=", averages=True),
        *_peak(gpu, peak),
        Layer("used", used, "used", "█", "#", averages=True),
    ]


def owner_layers(gpu: GpuHistoryView, *, colour: bool) -> list[Layer]:
    """Return what each user used, above what those used who used more."""
    layers: list[Layer] = []
    below: Series = [None if each is None else 0 for each in on_average(gpu, "used")]
    drawn: set[Style] = set()
    for number, (name, series) in enumerate(_by_owner(gpu)):
        below = [_sum(*each) for each in zip(series, below, strict=True)]
        letter = "!" if name == NO_LEASE else chr(ord("A") + number)
        style = _STYLES.get(name) or owner_style(name)
        # Of two users with one colour, the second is drawn with a letter.
        block = "█" if colour and style not in drawn else letter
        layers.append(Layer(name, below, style, block, letter, averages=True))
        drawn.add(style)
    return [*_peak(gpu, gpu.used), *layers[::-1]]


def _peak(view: GpuHistoryView | JobGpuSeriesView, largest: Series) -> list[Layer]:
    """Return the largest values as a faint band behind the means, if there are means."""
    return [Layer(PEAK, largest, "dim", "░", ".")] if view.means else []


def _by_owner(gpu: GpuHistoryView) -> Iterator[tuple[str, Series]]:
    for owner in gpu.owners:
        name = OTHERS if owner.user is None else clean(owner.user)
        yield name, owner.used if owner.mean is None else _rounded(owner.mean.values)
    if any(gpu.unmanaged) or not gpu.owners:
        yield NO_LEASE, on_average(gpu, "unmanaged")


def _rounded(means: Sequence[float | None]) -> Series:
    return [None if each is None else round(each) for each in means]


def _less(amount: int | None, other: int | None) -> int | None:
    return amount if amount is None or other is None else max(0, amount - other)


def _sum(*amounts: int | None) -> int | None:
    known = [each for each in amounts if each is not None]
    return sum(known) if known else None


def _most(*amounts: int | None) -> int | None:
    return max((each for each in amounts if each is not None), default=None)


def _at_most(series: Series, total: int | None) -> Series:
    """Return a sum of peaks, which need not have been at one time, within all memory."""
    return [each if each is None or total is None else min(each, total) for each in series]
