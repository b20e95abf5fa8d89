"""The part of the screen for the GPUs: a panel of three lines for each, or a row. Pure.

A memory bar has one piece for each owner: what is used, what is leased and not used, and in the
larger of both the name. The pieces differ in their characters, and in colour where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpulease.cli.memory_layers import owner_style
from gpulease.cli.status_page import notes
from gpulease.cli.top.text import Line, Span, apart, fitted, width_of
from gpulease.cli.top.trend import Trend, sparkline
from gpulease.drawing.words import (
    UNKNOWN,
    amount,
    clean,
    degrees,
    display_width,
    index_of,
    percent,
    shorten,
    size,
    truncate,
)
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView, StatusView
from gpulease.wire.text import free_of, model
from gpulease.wire.unmanaged import used_without_lease

PANEL = 3
"""Lines of a panel."""
_PANEL_WIDTH = 60
_ROW_WIDTH = 38
"""The narrowest of each, in cells."""
_BEST_PANEL_WIDTH = 90
_GAP = 2
_TREND = 12
"""Characters of the sparkline in a row."""
_LEAST_NOTE = 22
_NARROW_WIDTH = 22
"""Of a GPU with nothing but a bar and what is free, where rows would leave no room for jobs."""


@dataclass(frozen=True)
class Marks:
    """The characters of a bar."""

    used: str
    leased: str
    unmanaged: str
    free: str
    closed: str
    exclusive: str
    rule: str
    blocks: bool


BLOCKS = Marks("█", "▒", "▚", "░", "╱", "▓", "─", blocks=True)
LETTERS = Marks("#", "=", "!", ".", "/", "x", "-", blocks=False)
"""For a terminal without UTF-8."""


@dataclass
class Trends:
    """The last minutes of one GPU."""

    memory: Trend = field(default_factory=Trend)
    utilization: Trend = field(default_factory=Trend)

    def see(self, gpu: GpuView, at: float) -> None:
        """Take in a look at the GPU."""
        self.utilization.put(at, gpu.utilization)
        if gpu.memory.total and gpu.memory.used is not None:
            self.memory.put(at, 100 * gpu.memory.used / gpu.memory.total)


@dataclass
class Owner:
    """What the jobs of one user lease and use of one GPU, in bytes."""

    user: str
    used: int = 0
    leased: int = 0
    """Leased and not used."""


@dataclass(frozen=True)
class Shown:
    """What is known of one GPU."""

    gpu: GpuView
    owners: tuple[Owner, ...]
    alone: str | None
    """The user whose job leases it exclusively."""
    unmanaged: int
    """Used without a lease, as far as it is drawn."""
    state: str
    """Why it is not simply available; otherwise empty."""
    style: str
    trends: Trends


@dataclass(frozen=True)
class Layout:
    """How the GPUs are arranged."""

    columns: int
    width: int
    """Cells of each."""
    has_panels: bool

    def height(self, count: int) -> int:
        """Return the lines that `count` GPUs take."""
        lines = -(-count // self.columns)
        return lines * PANEL if self.has_panels else lines


def layout(count: int, width: int, height: int) -> Layout:
    """Arrange GPUs in at most half of a screen of that size, where possible.

    Panels if they fit, in as many columns as needed; else one row for each GPU, in columns; else
    narrow ones.
    """
    for least in (_PANEL_WIDTH, _ROW_WIDTH, _NARROW_WIDTH):
        has_panels = least == _PANEL_WIDTH
        most = max(1, (width + _GAP) // (least + _GAP))
        fewest = min(count, width // _BEST_PANEL_WIDTH) if has_panels else 1
        for columns in range(max(1, fewest), most + 1):
            found = Layout(columns, (width - _GAP * (columns - 1)) // columns, has_panels)
            if found.height(count) <= height // 2 or (columns == most and least == _NARROW_WIDTH):
                return found
    raise AssertionError("the last layout is always taken")


def gpu_lines(
    shown: Sequence[Shown],
    arranged: Layout,
    marks: Marks,
    now: float,
) -> list[Line]:
    """Draw the GPUs."""
    draw = _panel if arranged.has_panels else _row
    drawn = [draw(each, arranged.width, marks, now) for each in shown]
    height = PANEL if arranged.has_panels else 1
    down = -(-len(drawn) // arranged.columns)
    lines = []
    for number in range(down):
        beside = drawn[number::down]
        for y in range(height):
            parts = [part for each in beside for part in (*each[y], (" " * _GAP, ""))]
            lines.append(tuple(parts[:-1]))
    return lines


def shown_gpus(view: StatusView, trends: Mapping[str, Trends]) -> list[Shown]:
    """Return what is known of each GPU."""
    owners: dict[str, dict[str, Owner]] = {gpu.uuid: {} for gpu in view.gpus}
    alone: dict[str, JobView] = {}
    for job in view.jobs:
        for lease in job.leases if job.state not in {"queued", "ended"} else ():
            here = owners.setdefault(lease.gpu, {})
            owner = here.setdefault(clean(job.user), Owner(clean(job.user)))
            owner.used += lease.used or 0
            owner.leased += max(0, lease.memory - (lease.used or 0))
            if job.claim.exclusive:
                alone[lease.gpu] = job
    return [
        Shown(
            gpu,
            tuple(each for _, each in sorted(owners[gpu.uuid].items())),
            clean(alone[gpu.uuid].user) if gpu.uuid in alone else None,
            used_without_lease(gpu, view),
            *_state(gpu, alone[gpu.uuid].id if gpu.uuid in alone else None, view),
            trends.get(gpu.uuid) or Trends(),
        )
        for gpu in view.gpus
    ]


def _state(gpu: GpuView, alone: int | None, view: StatusView) -> tuple[str, str]:
    """Return in the words of `status` why a GPU is not simply available, and the style."""
    found = list(notes(gpu, alone, view))
    texts = [each.text if each.job is None else f"{each.text} {each.job}" for each in found]
    return "; ".join(texts), found[0].style if found else ""


def bar(shown: Shown, width: int, marks: Marks) -> Line:
    """Draw the memory of a GPU."""
    memory = shown.gpu.memory
    if not memory.total or memory.used is None:
        return (("?" * width, "dim"),)
    spans: list[Span] = []
    begin, done = 0, 0
    for owner in shown.owners:
        cells = [round(width * (done + part) / memory.total) for part in (owner.used, _all(owner))]
        ends = [min(width, cell) for cell in cells]
        spans += _piece(owner, ends[0] - begin, ends[1] - ends[0], marks)
        begin, done = ends[1], done + _all(owner)
    end = min(width, round(width * (done + shown.unmanaged) / memory.total))
    spans.append((marks.unmanaged * (end - begin), "unmanaged"))
    rest = (marks.free, "free") if free_of(shown.gpu) else (marks.closed, "closed")
    if shown.alone is not None:
        rest = marks.exclusive, owner_style(shown.alone)
    spans.append((rest[0] * (width - end), rest[1]))
    return tuple(span for span in spans if span[0])


def _all(owner: Owner) -> int:
    return owner.used + owner.leased


def _piece(owner: Owner, used: int, leased: int, marks: Marks) -> list[Span]:
    """Draw what one owner has, with the name in the larger part, which stays recognizable."""
    style = owner_style(owner.user)
    if leased >= used:
        return [(marks.used * used, style), *_with_name(owner.user, leased, marks.leased, style)]
    named = _with_name(owner.user, used - 1, marks.used, style)
    return [(marks.used, style), *named, (marks.leased * leased, style)]


def _with_name(user: str, cells: int, mark: str, style: str) -> list[Span]:
    """Draw cells that begin with a name, and end with a mark."""
    name = truncate(user, max(0, cells - 1))
    return [(name, f"{style}-name"), (mark * (cells - width_of(((name, ""),))), style)]


def _row(shown: Shown, width: int, marks: Marks, now: float) -> list[Line]:
    """Draw a GPU in one line."""
    gpu = shown.gpu
    title: Span = (f"{index_of(gpu):>3} ", "title")
    if width < _ROW_WIDTH:
        free: Span = (f" {_free(shown):>5}", shown.style or _free_style(shown))
        return [fitted((title, *bar(shown, width - 10, marks), free), width)]
    figures: list[Span] = [(f" {_free(shown):>6} free", _free_style(shown))]
    if width >= _ROW_WIDTH + 8:
        figures.insert(0, (f" {amount(gpu.memory.used):>6} used", ""))
    figures.append((f" {percent(gpu.utilization):>4}", ""))
    if gpu.temperature is not None:
        figures.append((f" {degrees(gpu.temperature):>4}", ""))
    if width >= _ROW_WIDTH + 24:
        if gpu.power is not None:
            figures.append((f" {_watts(gpu.power):>4}", ""))
        figures.append((f" {_history(shown, _TREND, marks, now)}", "dim"))
    # A note replaces figures, the last first, and never shortens the bar.
    room = max(width_of(tuple(figures)), _LEAST_NOTE)
    space = width - width_of((title,)) - room
    if shown.state:
        state = shorten(f" {shown.state}", room)
        while figures and width_of(tuple(figures)) + display_width(state) > room:
            figures.pop()
        figures.append((state, shown.style))
    return [fitted((title, *bar(shown, space, marks), *figures), width)]


def _panel(shown: Shown, width: int, marks: Marks, now: float) -> list[Line]:
    """Draw a GPU in three lines: what it is, its memory, and the last minutes."""
    gpu = shown.gpu
    memory = gpu.memory
    figures = (
        (f" {amount(memory.used):>6} used ", ""),
        (f"{_free(shown):>6} free", _free_style(shown)),
        (f" of {size(memory.total):<5}", "dim"),
    )
    space = max(0, width - width_of(figures) - 1)
    return [
        _title(shown, width, marks),
        fitted(((" ", ""), *bar(shown, space, marks), *figures), width),
        _trends(shown, width, marks, now),
    ]


def _title(shown: Shown, width: int, marks: Marks) -> Line:
    gpu = shown.gpu
    left: Line = (
        (marks.rule * 2 + " ", "dim"),
        (f"GPU {index_of(gpu)}", "title"),
        (f" {model(gpu.name, gpu.memory.total)} ", "dim"),
        *(((f"{shown.state} ", shown.style),) if shown.state else ()),
    )
    limit = "" if gpu.power_limit is None else f" of {_watts(gpu.power_limit)}"
    known = [degrees(gpu.temperature), f"{_watts(gpu.power)}{limit}"]
    right: Line = (("".join(f" {each}" for each in known if each != UNKNOWN), ""),)
    space = max(0, width - width_of(left) - width_of(right))
    return fitted((*left, (marks.rule * space, "dim"), *right), width)


def _trends(shown: Shown, width: int, marks: Marks, now: float) -> Line:
    """Draw the utilization and the memory of the last minutes."""
    each = (width - 1) // 2 - 10
    utilization = sparkline(shown.trends.utilization.last(each, now), blocks=marks.blocks)
    memory = sparkline(shown.trends.memory.last(each, now), blocks=marks.blocks)
    left: Line = ((f" util {percent(shown.gpu.utilization):>4} ", ""), (utilization, "good"))
    return apart(left, ((" memory ", "dim"), (memory, "used")), width)


def _history(shown: Shown, count: int, marks: Marks, now: float) -> str:
    """Draw the last minutes: the utilization, or the memory where the driver reports none."""
    known = shown.trends.utilization if shown.gpu.utilization is not None else shown.trends.memory
    return sparkline(known.last(count, now), blocks=marks.blocks)


def _free(shown: Shown) -> str:
    return amount(free_of(shown.gpu))


def _free_style(shown: Shown) -> str:
    return "good" if free_of(shown.gpu) and not shown.state else ""


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}W"
