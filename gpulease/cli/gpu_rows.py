"""GPUs as `status` shows them, of a machine or a cluster: a bar of their memory, figures, notes."""

from __future__ import annotations

from gpulease.cli.tables import Column, Line, Span, Style, Table, line, widths
from gpulease.drawing.gpus import Note, labels_in_ranges, places, remainder
from gpulease.drawing.words import UNKNOWN, amount, degrees, display_width, percent
from gpulease.record import record, replace
from gpulease.units import counted
from gpulease.wire.text import ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gpulease.cli.tables import Block
    from gpulease.slurm.command.views import MemoryView as ClusterMemoryView
    from gpulease.wire.machine import MemoryView

    Memory = MemoryView | ClusterMemoryView

_WIDEST_BAR, _NARROWEST_BAR = 32, 10
_GAP = 2
_NARROW_GPU, _FREE = 22, 5
"""Columns of a GPU that shares its line with others, and of what is free there."""
_NOTES = 20
"""Columns of a terminal that notes on GPUs keep beside a bar."""
_MOST_GPU_ROWS = 8
"""Of more GPUs, those in the same state share a row on a terminal."""
_LABELS = 12
"""The columns that the labels of GPUs in one row keep."""
GLYPHS: dict[Style, tuple[str, str]] = {
    "used": ("█", "used"),
    "leased": ("▒", "leased"),
    "unmanaged": ("▚", "no lease"),
    "free": ("░", "free"),
    "exclusive": ("▓", "exclusive"),
    "closed": ("╱", "unavailable"),
}
"""The parts of a bar, which differ without colour; `render` has their letters in ASCII."""


def bar(row: GpuRow, cells: int) -> Line:
    """Draw the memory of a GPU: used under leases, leased and not used, without a lease, free.

    Parts are rounded to cells. A part below half a cell is not drawn; the figures show it. What
    remains of a GPU on which nothing can be leased is not drawn as free.
    """
    memory = row.memory
    if not memory.total or memory.used is None:
        return line(UNKNOWN, "dim")
    committed = memory.committed or 0
    used = max(0, min(memory.used - (memory.unmanaged or 0), committed))
    parts: tuple[tuple[int, Style], ...] = (
        (used, "used"),
        (committed - used, "exclusive" if row.is_exclusive else "leased"),
        (row.unmanaged, "unmanaged"),
        (memory.total, remainder(row.free, is_exclusive=row.is_exclusive)),
    )
    drawn = zip(parts, places((amount for amount, _ in parts), memory.total, cells), strict=True)
    return tuple(
        Span(GLYPHS[style][0] * (end - begin), style)
        for (_, style), (begin, end) in drawn
        if end > begin
    )


def _legend(bars: Iterable[Line], indent: int) -> Line:
    """Name the parts that occur in bars."""
    drawn = {style for each in bars for _, style in each}
    spans = [Span(" " * indent)]
    for style, (glyph, name) in GLYPHS.items():
        if style in drawn:
            spans += [Span(glyph, style), Span(f" {name}  ", "dim")]
    return tuple(spans)


@record(frozen=True)
class GpuRow:
    """A GPU, or several in the same state."""

    label: str
    memory: Memory
    free: int | None
    """What can be leased now; None if unknown."""
    notes: tuple[Note, ...] = ()
    unmanaged: int = 0
    """Used without a lease, as far as it is drawn."""
    is_exclusive: bool = False
    utilization: int | None = None
    temperature: int | None = None
    node: str = ""
    model: str = ""
    age: str = ""


def gpu_table(
    rows: Sequence[GpuRow], width: int | None, *, folds: bool, legend: bool = True
) -> Iterator[Block]:
    """Lay out GPUs, with bars and a legend; with `folds`, many in the same state share rows."""
    groups = [[row] for row in rows]
    if folds and len(rows) > _MOST_GPU_ROWS:
        groups = _in_same_state(rows)
    columns, write = zip(*_gpu_columns(rows), strict=True)
    cells = [[cell(group) for cell in write] for group in groups]
    *figures, _ = zip(columns, zip(*cells, strict=True), strict=True)
    # A note never shortens a bar: its columns are kept whether or not there is one.
    beside = _GAP + _NOTES + sum(_width_beside(*each) for each in figures)
    bars = [bar(group[0], _bar_width(width, beside)) for group in groups]
    place = [column.title for column in columns].index("used")
    columns = (*columns[:place], Column("memory", leaves=5), *columns[place:])
    pairs = zip(cells, bars, strict=True)
    table = Table(columns, tuple((*row[:place], drawn, *row[place:]) for row, drawn in pairs))
    yield table
    if legend and place in widths(table, width):
        yield _legend(bars, 5)


def gpus_in_columns(rows: Sequence[GpuRow], width: int | None) -> Iterator[Block]:
    """Lay out several GPUs in a line, each with its bar and what is free."""
    longest = max(len(row.label) for row in rows)
    width = width or _WIDEST_BAR
    count = max(1, (width + _GAP) // (_NARROW_GPU + _GAP))
    cells = (width - _GAP * (count - 1)) // count - longest - _FREE - 2
    for first in range(0, len(rows), count):
        spans: list[Span] = []
        for row in rows[first : first + count]:
            drawn = bar(row, max(_NARROWEST_BAR, min(_WIDEST_BAR, cells)))
            ((free, style),) = _free(row)
            label = Span(f"{' ' * _GAP if spans else ''}{row.label:>{longest}} ")
            spans += [label, *drawn, Span(f" {free:>{_FREE}}", style)]
        yield tuple(spans)


def gpus_in_words(rows: Sequence[GpuRow]) -> str:
    """Say how many GPUs there are, and how much can be leased at most on one of them."""
    count = counted(len(rows), "GPU")
    most = max(rows, key=lambda row: row.free or 0)
    if not most.free:
        return f"{count}, none with free memory"
    return f"{count}, at most {amount(most.free)} free, on GPU {most.label}"


def _width_beside(column: Column, cells: Iterable[Line]) -> int:
    """Return the width that a column keeps beside bars, with its gap."""
    texts = ("".join(text for text, _ in cell) for cell in cells)
    natural = max(display_width(column.title), *map(display_width, texts))
    return _GAP + (min(natural, column.least) if column.wraps else natural)


def _bar_width(width: int | None, beside: int) -> int:
    room = _WIDEST_BAR if width is None else width - beside
    return max(_NARROWEST_BAR, min(_WIDEST_BAR, room))


def _in_same_state(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    """Return GPUs in groups that share a row, the first of each with the labels of all."""
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        notes = tuple((note.text, note.job is None) for note in row.notes)
        key = row.node, row.model, row.age, bar(row, _WIDEST_BAR), amount(row.free), notes
        groups.setdefault(key, []).append(place)
    labels = [row.label for row in rows]
    return [
        [
            replace(rows[first], label=labels_in_ranges([first, *others], labels)),
            *(rows[n] for n in others),
        ]
        for first, *others in groups.values()
    ]


def _gpu_columns(
    rows: Sequence[GpuRow],
) -> list[tuple[Column, Callable[[Sequence[GpuRow]], Line]]]:
    """Return the columns without the bars, each with what writes its cells.

    What is known of no GPU has no column.
    A cell is that of a row, which may show several GPUs.
    """
    found: list[tuple[Column, Callable[[Sequence[GpuRow]], Line]]] = [
        (
            Column("GPU", right=True, wraps=True, least=_LABELS, narrows_first=True),
            lambda group: line(group[0].label),
        ),
        (Column("used", right=True), lambda group: _spread(amount, group, "used")),
        (Column("free", right=True), lambda group: _free(group[0])),
        (Column("", leaves=1, wraps=True, least=14, below=""), _notes),
    ]
    if any(row.node for row in rows):
        found.insert(0, (Column("NODE"), lambda group: line(group[0].node)))
    if any(row.model for row in rows):
        model = Column("model", leaves=4, shrinks=True, below="")
        found.insert(-3, (model, lambda group: line(group[0].model)))
    if any(row.utilization is not None for row in rows):
        util = Column("util", right=True, leaves=3)
        found.insert(-1, (util, lambda group: _spread(percent, group, "utilization")))
    if any(row.temperature is not None for row in rows):
        temp = Column("temp", right=True, leaves=6)
        found.insert(-1, (temp, lambda group: _spread(degrees, group, "temperature")))
    if any(row.age for row in rows):
        age = Column("age", right=True, leaves=7, below="age ")
        found.insert(-1, (age, lambda group: line(group[0].age)))
    return found


def _spread(write: Callable[[int | None], str], group: Sequence[GpuRow], name: str) -> Line:
    """Write the smallest and the largest value of GPUs in one row."""
    values = [row.memory.used if name == "used" else getattr(row, name) for row in group]
    known = sorted(value for value in values if value is not None)
    if len(known) < len(values):
        return line(UNKNOWN)
    least, most = write(known[0]), write(known[-1])
    return line(most if least == most else f"{least.rstrip('%C')}-{most}")


def _free(row: GpuRow) -> Line:
    """Write what can be leased: in green only if anyone can have it."""
    style: Style = "good" if row.free and not row.notes else "warn" if row.free else "dim"
    return line(amount(row.free), style)


def _names(labels: Mapping[int, str]) -> str:
    """Name jobs, by their ids, as people see them: 5-7, or 8_1, 8_2."""
    ids = sorted(labels)
    if all(labels[job] == str(job) for job in ids):
        return ranges(ids)
    return ", ".join(labels[job] for job in ids)


def _notes(group: Sequence[GpuRow]) -> Line:
    spans: list[Span] = []
    for number, note in enumerate(group[0].notes):
        jobs = {row.notes[number].job or 0: row.notes[number].label for row in group}
        text = note.text
        if note.job is not None:
            text += f"{'s' * (len(jobs) > 1)} {_names(jobs)}"
        spans += [Span("; ", "dim")] * bool(spans) + [Span(text, note.style)]
    return tuple(spans) or line("")
