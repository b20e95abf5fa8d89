"""Charts of memory over time in files: SVG by the geometry of the web page, PNG by matplotlib.

matplotlib is an optional dependency and imported here only. It needs no window system.
"""

from __future__ import annotations

from datetime import timedelta
from html import escape
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulease.daemon_packages import install_hint
from gpulease.drawing.axes import size_step
from gpulease.drawing.charts import PLOT_HEIGHT, PLOT_WIDTH, Curve, memory_chart
from gpulease.errors import BadValue, GpuleaseError
from gpulease.units import format_size
from gpulease.wire.text import USER_COLOURS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import tzinfo

    from matplotlib.axes import Axes

    from gpulease.cli.chart import Chart, Layer

ENDINGS = (".png", ".svg")
_MOST_TICKS = 4
FILLS = {
    "used": "#0072b2",
    "leased": "#56b4e9",
    "unmanaged": "#d55e00",
    "dim": "#d0d0d0",
    "heading": "#999999",
    **{f"owner{number}": colour for number, colour in enumerate(USER_COLOURS)},
}
"""Those of a job and of a GPU are of Okabe and Ito, "Color Universal Design": they differ for
people who are colour-blind."""
_WIDTH, _HEIGHT = 9.0, 4.0
"""Of one chart in a PNG file, in inches."""
_SVG_WIDTH, _SVG_HEIGHT = 980, 240
"""Of one chart in an SVG file, in pixels; the plot begins at the others and is so wide."""
_LEFT, _TOP, _PLOT = 60, 40, 700


def check_out(path: Path) -> None:
    """Check that a chart can be drawn into a file, before there is one.

    Raises:
        BadValue: the ending is unknown, or there is something that is not a file.
        GpuleaseError: matplotlib is not installed.
    """
    if (kind := path.suffix.lower()) not in ENDINGS:
        raise BadValue(
            f"cannot plot into {path}: unknown kind of file",
            "use a name such as memory.svg or memory.png",
        )
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "no regular file"
        raise BadValue(f"cannot plot into {path}: it is {what}", "name a file, such as memory.svg")
    if kind == ".png":
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise GpuleaseError(
                f"cannot plot into {path}: matplotlib, which draws PNG, is not installed",
                f"name an SVG file, which does not need it: {path.with_suffix('.svg')}; or: "
                f"{install_hint('plot')}",
            ) from error


def draw_into(path: Path, charts: Sequence[Chart]) -> None:
    """Draw charts below each other into a file that `check_out` has accepted.

    Raises:
        BadValue: the file cannot be written.
    """
    try:
        if path.suffix.lower() == ".svg":
            path.write_text("".join(_svg(charts)), encoding="utf-8")
        else:
            _draw_png(path, charts)
    except OSError as error:
        raise BadValue(f"cannot write {path}: {error.strerror}") from error


def _svg(charts: Sequence[Chart]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH}" '
        f'height="{_SVG_HEIGHT * len(charts)}" font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
    )
    for place, chart in enumerate(charts):
        yield f'<svg y="{_SVG_HEIGHT * place}" height="{_SVG_HEIGHT}">\n'
        yield _text("".join(text for text, _ in chart.head), _LEFT, 24, 'font-size="14"')
        yield from _svg_plot(chart)
        yield "</svg>\n"
    yield "</svg>\n"


def _svg_plot(chart: Chart) -> Iterator[str]:
    """Yield the axes, the areas, the line of the limit and the legend of a chart."""
    looks = [(_look(layer), layer.name) for layer in chart.layers]
    curves = [Curve("", each.name, each.values, is_stacked=False) for each in chart.layers]
    if (limit := chart.limit) is not None:
        steps = max(len(each.values) for each in chart.layers)
        looks.append(('fill="none" stroke="black" stroke-dasharray="6 3"', limit.name))
        curves.append(Curve("", limit.name, [limit.value] * steps, is_line=True))
    drawn = memory_chart("", chart.times.begins_at.isoformat(), chart.times.step, curves)
    if drawn is None:  # all of it is unknown
        return
    bottom = _TOP + PLOT_HEIGHT
    for mark in drawn.y:
        yield _text(mark.text, _LEFT - 8, _TOP + mark.at + 4, 'text-anchor="end"')
        yield f'<path stroke="#ddd" d="M{_LEFT} {_TOP + mark.at:g}h{_PLOT}"/>\n'
    for mark in drawn.x:
        x = _LEFT + _PLOT * mark.at / 100
        yield _text(mark.text, x, bottom + 18, 'text-anchor="middle"')
        yield f'<path stroke="#ddd" d="M{x:g} {_TOP}v{PLOT_HEIGHT}"/>\n'
    yield f'<g transform="translate({_LEFT} {_TOP}) scale({_PLOT / PLOT_WIDTH:g} 1)">\n'
    for (look, _), shape in zip(looks, drawn.shapes, strict=True):
        yield f'<path {look} vector-effect="non-scaling-stroke" d="{shape.path}"/>\n'
    yield "</g>\n"
    for place, (look, name) in enumerate(looks):
        x, y = _LEFT + _PLOT + 16, _TOP + 18 * place
        yield f'<rect x="{x}" y="{y}" width="12" height="12" {look}/>\n'
        yield _text(name, x + 18, y + 10)


def _look(layer: Layer) -> str:
    """Return how an area is filled; the second user with one colour has an edge, as on the page."""
    edge = ' stroke="black" stroke-dasharray="2 3"' if _is_second(layer) else ""
    return f'fill="{FILLS[layer.style]}"{edge}'


def _is_second(layer: Layer) -> bool:
    return layer.style.startswith("owner") and layer.block != "█"


def _text(text: str, x: float, y: float, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(text)}</text>\n'


def _draw_png(path: Path, charts: Sequence[Chart]) -> None:
    # Without pyplot: it draws into a file alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(charts)), layout="constrained")
    axes = figure.subplots(len(charts), 1, squeeze=False)
    for (each,), chart in zip(axes, charts, strict=True):
        _draw(each, chart)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, chart: Chart) -> None:
    times = chart.times
    begin = times.begins_at.astimezone(times.zone)
    count = max(len(layer.values) for layer in chart.layers)
    # The last value is drawn up to the end of its step.
    instants: list[Any] = [
        begin + timedelta(seconds=times.step) * number for number in range(count + 1)
    ]
    for layer in chart.layers:
        values = [nan if each is None else each for each in (*layer.values, layer.values[-1])]
        axes.fill_between(
            instants, values, step="post", facecolor=FILLS[layer.style], linewidth=0,
            label=layer.name, hatch="//" if _is_second(layer) else None, edgecolor="white",
        )  # fmt: skip
    top = max([value or 0 for layer in chart.layers for value in layer.values])
    if chart.limit is not None:
        top = max(top, chart.limit.value)
        axes.axhline(chart.limit.value, color="black", linestyle="--", label=chart.limit.name)
    ticks = range(0, top + 1, size_step(top, _MOST_TICKS))
    axes.set_yticks(ticks, [format_size(each) for each in ticks])
    axes.set_ylim(0, top * 1.05 or 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlim(instants[0], instants[-1])
    _label_times(axes, begin.tzinfo)
    axes.set_title("".join(text for text, _ in chart.head))


def _label_times(axes: Axes, zone: tzinfo | None) -> None:
    """Label the horizontal axis with times of a zone; the date stands once, at its end."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(zone)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, zone)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)
