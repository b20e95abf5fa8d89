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
_SIZE_TICKS = 5


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
    highest: float
    """What the upper edge stands for, in `unit`, or in bytes without one."""
    unit: str = ""
    step_for: timedelta = timedelta(0)
    """The time of one value."""
    gaps: Sequence[tuple[float, float]] = ()
    """Where nothing was recorded: begin and width, in percent of the width."""
    width: int = PLOT_WIDTH
    height: int = PLOT_HEIGHT

    def epoch_at(self, place: float) -> int:
        """Return the time at a place in percent of the width, in seconds of the epoch."""
        return round((self.begins_at + (self.ends_at - self.begins_at) * place / 100).timestamp())


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


def memory_chart(
    title: str, begins_at: str, step: float, curves: Sequence[Curve], top: int | None = None
) -> Chart | None:
    """Return a chart of bytes over time; None if nothing is known.

    Its axis ends at `top`, such as the memory of the GPU, unless a value is larger.
    """
    return _chart(
        title, begins_at, step, curves, lambda top: size_step(top, _SIZE_TICKS),
        lambda it: format_size(int(it)), top or 0,
    )  # fmt: skip


def plain_chart(
    title: str, begins_at: str, step: float, curves: Sequence[Curve], unit: str, top: float = 0
) -> Chart | None:
    """Return a chart of plain numbers; its axis reaches `top` at least."""
    return _chart(
        title, begins_at, step, curves, _number_step, lambda it: f"{round(it, 1):g}{unit}", top,
        unit,
    )  # fmt: skip


def _chart(
    title: str,
    begins_at: str,
    step: float,
    curves: Sequence[Curve],
    step_of: Callable[[float], float],
    write: Callable[[float], str],
    top: float = 0,
    unit: str = "",
) -> Chart | None:
    stacked = list(_stacked(curves))
    tops = [value for _, _, above in stacked for value in above if value is not None]
    if not tops:
        return None
    most = max(*tops, top, 1)
    y_step = step_of(most)
    highest = most if most == top else y_step * ceil(most / y_step)
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
        [Mark(PLOT_HEIGHT - value * scale.y, write(value)) for value in _marks(highest, y_step)],
        begin,
        end,
        highest,
        unit,
        timedelta(seconds=step),
        list(_gaps(curves, count)),
    )  # fmt: skip


def _marks(highest: float, step: float) -> list[float]:
    """Return the multiples of a step, and the upper edge in place of one that is close to it."""
    below = [each * step for each in range(ceil(highest / step))]
    return [*(value for value in below if highest - value > step / 2 or not value), highest]


def _gaps(curves: Sequence[Curve], count: int) -> Iterator[tuple[float, float]]:
    """Yield where nothing is known but what does not change, such as the size of a lease."""
    varying = [it.values for it in curves if None in it.values or len(set(it.values)) > 1]
    unknown = [
        index for index in range(count) if varying and all(it[index] is None for it in varying)
    ]
    for first, last in runs(unknown):
        yield round(100 * first / count, 3), round(100 * (last + 1 - first) / count, 3)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Units of the plot for a step of time, and for one of what is drawn."""

    x: float
    y: float

    def place(self, index: int, value: float) -> str:
        return f"{index * self.x:.6g} {self.height_of(value)}"

    def height_of(self, value: float) -> str:
        return f"{PLOT_HEIGHT - value * self.y:.5g}"


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
