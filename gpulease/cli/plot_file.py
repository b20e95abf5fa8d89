"""Charts of memory over time as PNG or SVG files."""

from __future__ import annotations

from datetime import timedelta
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulease.drawing.axes import size_step
from gpulease.figure_file import check_target, label_times, new_figure, save
from gpulease.units import format_size
from gpulease.wire.text import USER_COLOURS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from gpulease.cli.chart import Chart

ENDINGS = ("png", "svg")
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
"""Of one chart, in inches."""


def check_out(path: Path) -> None:
    """Check that a chart can be drawn into a file. Raises: BadValue."""
    check_target(path, "memory.png", ENDINGS)


def draw_into(path: Path, charts: Sequence[Chart]) -> None:
    """Draw charts below each other into a PNG or SVG file.

    Raises:
        BadValue: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(_WIDTH, _HEIGHT * len(charts))
    axes = figure.subplots(len(charts), 1, squeeze=False)
    for (each,), chart in zip(axes, charts, strict=True):
        _draw(each, chart)
    save(figure, path)


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
        colour = FILLS[layer.style]
        axes.fill_between(
            instants, values, step="post", facecolor=colour, linewidth=0, label=layer.name,
            # The second user with one colour.
            hatch="//" if layer.style.startswith("owner") and layer.block != "█" else None,
            edgecolor="white",
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
    label_times(axes, begin.tzinfo)
    axes.set_title("".join(text for text, _ in chart.head))
