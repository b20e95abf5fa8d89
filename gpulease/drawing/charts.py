"""Charts over time as SVG: areas and lines on a time axis. Pure geometry, which a template draws.

The plot is a nested SVG of PLOT_WIDTH units that is stretched to the width of the page, so that
texts beside it keep their size on a phone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil

from gpulease.drawing.axes import size_step, time_marks
from gpulease.drawing.words import instant
from gpulease.units import format_size
from gpulease.wire.history import MeanView
from gpulease.wire.text import runs

PLOT_WIDTH = 1000
PLOT_HEIGHT = 160

Series = Sequence[float | None]

_MOST_TICKS = 5
_Y_TICKS = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """A tick with its text, at a place in percent of the width or in units of the height."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Shape:
    """An area or a line: its class in style.css, its name in the legend, and its SVG path."""

    kind: str
    name: str
    path: str
    is_line: bool = False
    most: str = ""
    """Its highest value, in words; `mean`: its average, if that is known."""
    mean: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, ready to be drawn."""

    title: str
    shapes: Sequence[Shape]
    x: Sequence[Mark]
    y: Sequence[Mark]
    begins_at: datetime
    ends_at: datetime
    width: int = PLOT_WIDTH
    height: int = PLOT_HEIGHT


@dataclass(frozen=True, slots=True)
class Curve:
    """Values to draw, one for each step of time; None is a gap."""

    kind: str
    name: str
    values: Series
    is_line: bool = False
    is_stacked: bool = True
    """Whether an area stands on those before it."""
    peaks: Series | None = None
    """The largest values, where `values` are means."""
    overall: float | None = None
    """The mean over the whole time."""


def mean_curve(
    kind: str, name: str, peaks: Series, mean: MeanView | None, *, is_line: bool = False
) -> Curve:
    """Return the means of a series; those of an older daemon are its largest values."""
    if mean is None:
        return Curve(kind, name, peaks, is_line)
    return Curve(kind, name, mean.values, is_line, peaks=peaks, overall=mean.overall)


def peak_band(name: str, peaks: Series, mean: MeanView | None) -> list[Curve]:
    """Return the largest values as a faint area, to be drawn before the means."""
    return [] if mean is None else [Curve("peak", name, peaks, is_stacked=False)]


def memory_chart(title: str, begins_at: str, step: float, curves: Sequence[Curve]) -> Chart | None:
    """Return a chart of bytes over time; None if nothing is known."""
    return _chart(
        title, begins_at, step, curves, lambda top: size_step(top, _Y_TICKS),
        lambda it: format_size(int(it)),
    )  # fmt: skip


def plain_chart(
    title: str, begins_at: str, step: float, curves: Sequence[Curve], unit: str, top: float = 0
) -> Chart | None:
    """Return a chart of plain numbers; its axis reaches `top` at least."""
    return _chart(
        title, begins_at, step, curves, _number_step, lambda it: f"{round(it, 1):g}{unit}", top
    )


def _chart(
    title: str,
    begins_at: str,
    step: float,
    curves: Sequence[Curve],
    step_of: Callable[[float], float],
    write: Callable[[float], str],
    top: float = 0,
) -> Chart | None:
    stacked = list(_stacked(curves))
    tops = [value for _, _, above in stacked for value in above if value is not None]
    if not tops:
        return None
    y_step = step_of(max(*tops, top, 1))
    highest = y_step * ceil(max(*tops, top, 1) / y_step)
    count = max(len(curve.values) for curve in curves)
    begin = instant(begins_at).astimezone()
    # The clocks may have changed in between.
    end = (begin + timedelta(seconds=step * count)).astimezone()
    scale = _Scale(PLOT_WIDTH / count, PLOT_HEIGHT / highest)
    return Chart(
        title,
        [_shape(curve, below, above, scale, write) for curve, below, above in stacked],
        [Mark(round(100 * at, 2), text) for at, text in
         time_marks(begin, step * count, _MOST_TICKS) if at < 1],
        [Mark(PLOT_HEIGHT - each * y_step * scale.y, write(each * y_step))
         for each in range(round(highest / y_step) + 1)],
        begin,
        end,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scale:
    """Units of the plot for a step of time, and for one of what is drawn."""

    x: float
    y: float

    def place(self, index: int, value: float) -> str:
        return f"{index * self.x:.6g} {self.height_of(value)}"

    def height_of(self, value: float) -> str:
        return f"{PLOT_HEIGHT - value * self.y:.4g}"


def _stacked(curves: Sequence[Curve]) -> Iterator[tuple[Curve, Series, Series]]:
    """Yield each curve with its lower and upper edge."""
    base: Series = [0.0] * max((len(curve.values) for curve in curves), default=0)
    for curve in curves:
        if curve.is_line or not curve.is_stacked:
            yield curve, [0.0] * len(curve.values), curve.values
            continue
        above = [
            None if value is None else value + (below or 0)
            for value, below in zip(curve.values, base, strict=True)
        ]
        yield curve, base, above
        base = [below if value is None else value for value, below in zip(above, base, strict=True)]


def _shape(
    curve: Curve, below: Series, above: Series, scale: _Scale, write: Callable[[float], str]
) -> Shape:
    known = runs([index for index, value in enumerate(above) if value is not None])
    parts = [range(first, last + 1) for first, last in known]
    if curve.is_line:
        path = "".join(_steps(run, above, scale, "M") for run in parts)
    else:
        path = "".join(
            _steps(run, above, scale, "M") + _steps(run[::-1], below, scale, "L", back=1) + "Z"
            for run in parts
        )
    largest = curve.values if curve.peaks is None else curve.peaks
    most = max((value for value in largest if value is not None), default=None)
    return Shape(
        curve.kind,
        curve.name,
        path,
        curve.is_line,
        "" if most is None else write(most),
        "" if curve.overall is None else write(curve.overall),
    )


def _steps(run: range, values: Series, scale: _Scale, first: str, back: int = 0) -> str:
    """Return a path along the top of each step, to the right, or `back` to the left."""
    parts = [f"{first}{scale.place(run[0] + back, values[run[0]] or 0)}"]
    for index in run:
        parts.append(f"V{scale.height_of(values[index] or 0)}")
        parts.append(f"H{(index + 1 - back) * scale.x:.6g}")
    return "".join(parts)


def _number_step(top: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, of which some marks reach `top`."""
    power = 1.0
    while True:
        for factor in (1, 2, 2.5, 5):
            if power * factor >= top / _Y_TICKS:
                return power * factor
        power *= 10
