"""The part of the screen for the GPUs: a panel of three lines for each, or a row. Pure.

A memory bar has one piece for each owner: what is used, what is leased and not used, and in the
larger of both the name. The pieces differ in their characters, and in colour where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpulease.cli.chart import owner_style
from gpulease.cli.gpu_rows import GLYPHS
from gpulease.cli.top.lines import Line, Span, apart, fitted, width_of
from gpulease.drawing.gpus import exclusive_job, notes, places, remainder
from gpulease.drawing.words import (
    UNKNOWN,
    amount,
    clean,
    degrees,
    display_width,
    figure,
    index_of,
    percent,
    shorten,
    size,
    truncate,
)
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView, StatusView
from gpulease.wire.text import free_of, model, used_without_lease

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
_USED, _LEASED = GLYPHS["used"][0], GLYPHS["leased"][0]
_RULE = "─"
_NARROW_WIDTH, _NARROWEST_WIDTH = 22, 11
"""Of a GPU with nothing but a bar and what is free, where rows would leave no room for jobs."""
SMALL = 16
"""Below this height of the screen the listing has most of it."""


STEP_S = 10
"""Seconds for each character. A sparkline moves at each step and not at each look, which sends less
over ssh."""
MOST = 120
"""Steps that are kept: 20 minutes."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class Trend:
    """The largest percentage of each step of time."""

    steps: dict[int, float] = field(default_factory=dict)
    """By the number of the step since the epoch."""

    def put(self, at: float, value: float | None) -> None:
        """Take in what was seen at an instant, in seconds since the epoch."""
        if value is None:
            return
        step = int(at // STEP_S)
        self.steps[step] = max(value, self.steps.get(step, 0.0))
        if len(self.steps) > MOST:
            del self.steps[min(self.steps)]

    def fill(self, begins_at: float, step: float, values: Sequence[float | None]) -> None:
        """Take in a series of the daemon's history, from `begins_at` on."""
        for number, value in enumerate(values):
            begin = begins_at + number * step
            for after in range(0, max(1, int(step)), STEP_S):
                self.put(begin + after, value)

    def last(self, count: int, now: float) -> list[float | None]:
        """Return the last `count` steps, the present one last; None where nothing is known."""
        step = int(now // STEP_S)
        return [self.steps.get(each) for each in range(step - count + 1, step + 1)]


def sparkline(values: Sequence[float | None]) -> str:
    """Draw percentages, one character each; what is unknown stays empty."""
    last = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[min(last, max(0, int(value * len(_BLOCKS) / 100)))]
        for value in values
    )


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
    """Arrange GPUs in the lines that a screen of that size has for them, where possible.

    Panels if they fit, in as many columns as needed; else one row for each GPU, in columns; else
    narrow ones.
    """
    for least in (_PANEL_WIDTH, _ROW_WIDTH, _NARROW_WIDTH, _NARROWEST_WIDTH):
        has_panels = least == _PANEL_WIDTH
        most = max(1, (width + _GAP) // (least + _GAP))
        fewest = min(count, width // _BEST_PANEL_WIDTH) if has_panels else 1
        for columns in range(max(1, fewest), most + 1):
            found = Layout(columns, (width - _GAP * (columns - 1)) // columns, has_panels)
            if found.height(count) <= most_lines(height):
                return found
    return found


def most_lines(height: int) -> int:
    """Return how many lines of a screen GPUs take: at most half of it, of a small one a fifth."""
    return max(2, height // (5 if height < SMALL else 2))


def gpu_lines(
    shown: Sequence[Shown],
    arranged: Layout,
    now: float,
) -> list[Line]:
    """Draw the GPUs."""
    draw = _panel if arranged.has_panels else _row
    drawn = [draw(each, arranged.width, now) for each in shown]
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
    holding = [job for job in view.jobs if job.state not in {"queued", "ended"}]
    for job in holding:
        for lease in job.leases:
            here = owners.setdefault(lease.gpu, {})
            owner = here.setdefault(clean(job.user), Owner(clean(job.user)))
            owner.used += lease.used or 0
            owner.leased += max(0, lease.memory - (lease.used or 0))
    return [
        _shown(gpu, owners[gpu.uuid], exclusive_job(gpu, holding), view, trends)
        for gpu in view.gpus
    ]


def _shown(
    gpu: GpuView,
    owners: Mapping[str, Owner],
    alone: JobView | None,
    view: StatusView,
    trends: Mapping[str, Trends],
) -> Shown:
    # The words of `status` for why a GPU is not simply available.
    found = list(notes(gpu, alone, view))
    texts = [each.text if each.job is None else f"{each.text} {each.label}" for each in found]
    return Shown(
        gpu,
        tuple(each for _, each in sorted(owners.items())),
        None if alone is None else clean(alone.user),
        used_without_lease(gpu, view),
        "; ".join(texts),
        found[0].style if found else "",
        trends.get(gpu.uuid) or Trends(),
    )


def bar(shown: Shown, width: int) -> Line:
    """Draw the memory of a GPU."""
    memory = shown.gpu.memory
    if not memory.total or memory.used is None:
        return (("?" * width, "dim"),)
    amounts = [amount for owner in shown.owners for amount in (owner.used, owner.leased)]
    parts = places([*amounts, shown.unmanaged, memory.total], memory.total, width)
    cells = [end - begin for begin, end in parts]
    spans: list[Span] = []
    for number, owner in enumerate(shown.owners):
        spans += _piece(owner, cells[2 * number], cells[2 * number + 1])
    rest = remainder(free_of(shown.gpu), is_exclusive=shown.alone is not None)
    spans.append((GLYPHS["unmanaged"][0] * cells[-2], "unmanaged"))
    style = rest if shown.alone is None else owner_style(shown.alone)
    spans.append((GLYPHS[rest][0] * cells[-1], style))
    return tuple(span for span in spans if span[0])


def _piece(owner: Owner, used: int, leased: int) -> list[Span]:
    """Draw what one owner has, with the name in the larger part, which stays recognizable."""
    style = owner_style(owner.user)
    if leased >= used:
        return [(_USED * used, style), *_with_name(owner.user, leased, _LEASED, style)]
    named = _with_name(owner.user, used - 1, _USED, style)
    return [(_USED, style), *named, (_LEASED * leased, style)]


def _with_name(user: str, cells: int, mark: str, style: str) -> list[Span]:
    """Draw cells that begin with a name, and end with a mark."""
    name = truncate(user, max(0, cells - 1))
    return [(name, f"{style}-name"), (mark * (cells - width_of(((name, ""),))), style)]


def _row(shown: Shown, width: int, now: float) -> list[Line]:
    """Draw a GPU in one line."""
    gpu = shown.gpu
    title: Span = (f"{index_of(gpu):>{1 if width < _NARROW_WIDTH else 3}} ", "title")
    if width < _ROW_WIDTH:
        free: Span = (f" {_free(shown):>5}", shown.style or _free_style(shown))
        space = max(1, width - width_of((title, free)))
        return [fitted((title, *bar(shown, space), free), width)]
    figures: list[Span] = [(f" {_free(shown):>6} free", _free_style(shown))]
    if width >= _ROW_WIDTH + 8:
        figures.insert(0, (f" {amount(gpu.memory.used):>6} used", ""))
    figures.append((f" {percent(gpu.utilization):>4}", ""))
    if gpu.temperature is not None:
        figures.append((f" {degrees(gpu.temperature):>4}", ""))
    if width >= _ROW_WIDTH + 24:
        if gpu.power is not None:
            figures.append((f" {figure(gpu.power, 'W'):>4}", ""))
        figures.append((f" {_history(shown, _TREND, now)}", "dim"))
    # A note replaces figures, the last first, and never shortens the bar.
    room = max(width_of(tuple(figures)), _LEAST_NOTE)
    space = width - width_of((title,)) - room
    if shown.state:
        state = shorten(f" {shown.state}", room)
        while figures and width_of(tuple(figures)) + display_width(state) > room:
            figures.pop()
        figures.append((state, shown.style))
    return [fitted((title, *bar(shown, space), *figures), width)]


def _panel(shown: Shown, width: int, now: float) -> list[Line]:
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
        _title(shown, width),
        fitted(((" ", ""), *bar(shown, space), *figures), width),
        _trends(shown, width, now),
    ]


def _title(shown: Shown, width: int) -> Line:
    gpu = shown.gpu
    left: Line = (
        (_RULE * 2 + " ", "dim"),
        (f"GPU {index_of(gpu)}", "title"),
        (f" {model(gpu.name, gpu.memory.total)} ", "dim"),
        *(((f"{shown.state} ", shown.style),) if shown.state else ()),
    )
    limit = "" if gpu.power_limit is None else f" of {figure(gpu.power_limit, 'W')}"
    known = [degrees(gpu.temperature), figure(gpu.power, "W") + limit]
    right: Line = (("".join(f" {each}" for each in known if each != UNKNOWN), ""),)
    space = max(0, width - width_of(left) - width_of(right))
    return fitted((*left, (_RULE * space, "dim"), *right), width)


def _trends(shown: Shown, width: int, now: float) -> Line:
    """Draw the utilization and the memory of the last minutes."""
    each = (width - 1) // 2 - 10
    utilization = sparkline(shown.trends.utilization.last(each, now))
    memory = sparkline(shown.trends.memory.last(each, now))
    left: Line = ((f" util {percent(shown.gpu.utilization):>4} ", ""), (utilization, "good"))
    return apart(left, ((" memory ", "dim"), (memory, "used")), width)


def _history(shown: Shown, count: int, now: float) -> str:
    """Draw the last minutes: the utilization, or the memory where the driver reports none."""
    known = shown.trends.utilization if shown.gpu.utilization is not None else shown.trends.memory
    return sparkline(known.last(count, now))


def _free(shown: Shown) -> str:
    return amount(free_of(shown.gpu))


def _free_style(shown: Shown) -> str:
    return "good" if free_of(shown.gpu) and not shown.state else ""
