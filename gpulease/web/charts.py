"""The charts of the pages, from what the daemon recorded. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpulease.drawing.charts import (
    Chart,
    Curve,
    Series,
    mean_curve,
    memory_chart,
    peak_band,
    plain_chart,
)
from gpulease.web.bars import colors
from gpulease.wire.history import GpuHistoryView, JobMemoryView, MeanView

TREND_S = 600.0
TREND_POINTS = 30
"""Of the curve of a GPU on the page of the machine."""


def job_charts(memory: JobMemoryView, user: str) -> Iterator[Chart]:
    """Yield the charts of one job: on each GPU its memory against its lease, and utilization."""
    for each in memory.gpus:
        mean, busy = each.means.get("used"), each.means.get("utilization")
        kind = f"used {colors([user])[user]}"
        used = replace(mean_curve(kind, "used", each.used, mean), is_stacked=False)
        curves = [
            *peak_band("peak of use", each.used, mean),
            used,
            Curve("pool", "in memory pools of frameworks", each.pool, is_line=True),
            Curve("lease", "lease", [each.leased] * len(each.used), is_line=True),
        ]
        known = [it for it in curves if any(value is not None for value in it.peaks or it.values)]
        title = f"Memory on GPU {each.label}"
        yield from _drawn(memory_chart(title, memory.begins_at, memory.step, known, each.leased))
        yield from _plain(memory, f"Utilization of GPU {each.label}", "%", 100,
                          "utilization", each.utilization, busy)  # fmt: skip


def gpu_charts(history: GpuHistoryView) -> Iterator[Chart]:
    """Yield the charts of one GPU: its memory by owner, utilization, temperature and power."""
    color, mean = colors(each.user for each in history.owners), history.means.get
    curves = peak_band("peak of use", history.used, mean("used"))
    for each in history.owners:
        kind, name = f"used {color.get(each.user, 'others')}", each.user or "other users"
        curves.append(mean_curve(kind, name, each.used, each.mean))
    curves.append(mean_curve("unmanaged", "no lease", history.unmanaged, mean("unmanaged")))
    curves.append(mean_curve("lease", "leased", history.leased, mean("leased"), is_line=True))
    total: list[float | None] = [history.total] * len(history.used)
    curves.append(Curve("total", "all memory", total, is_line=True))
    if any(value is not None for value in (*history.used, *history.leased)):
        yield from _drawn(_memory(history, curves))
    for title, unit, top, values in (
        ("Utilization", "%", 100, history.utilization),
        ("Temperature", " °C", 0, history.temperature),
        ("Power", " W", 0, history.power),
    ):
        name = title.lower()
        yield from _plain(history, title, unit, top, name, values, mean(name))


def _plain(
    over: GpuHistoryView | JobMemoryView,
    title: str,
    unit: str,
    top: float,
    name: str,
    values: Sequence[int | None],
    mean: MeanView | None,
) -> Iterator[Chart]:
    """Yield a chart of one value: its means as a line, its largest values as a band."""
    line = mean_curve("busy", name, values, mean, is_line=True)
    curves = [*peak_band(f"peak of {name}", values, mean), line]
    yield from _drawn(plain_chart(title, over.begins_at, over.step, curves, unit, top))


def _drawn(chart: Chart | None) -> Iterator[Chart]:
    if chart is not None:
        yield chart


def _memory(history: GpuHistoryView, curves: Sequence[Curve]) -> Chart | None:
    return memory_chart("Memory", history.begins_at, history.step, curves, history.total)


def user_chart(user: str, histories: Sequence[GpuHistoryView]) -> Chart | None:
    """Return a chart of what a user used on all GPUs together."""
    on_gpus: list[Series] = [
        each.used if each.mean is None else each.mean.values
        for history in histories
        for each in history.owners
        if each.user == user
    ]
    if not on_gpus:
        return None
    known = [any(value is not None for value in it) for it in zip(*(
        history.used for history in histories), strict=False)]  # fmt: skip
    sums = [sum(value or 0 for value in it) for it in zip(*on_gpus, strict=False)]
    values = [each if is_known else None for each, is_known in zip(sums, known, strict=False)]
    curve = Curve(f"used {colors([user])[user]}", "used", values)
    return memory_chart("Memory on all GPUs", histories[0].begins_at, histories[0].step, [curve])


def trend(history: GpuHistoryView) -> str:
    """Return the utilization of a GPU as the path of an area, 100 wide and 20 high."""
    mean = history.means.get("utilization")
    values = history.utilization if mean is None else mean.values
    width = 100 / max(1, len(values))
    return "".join(
        f"M{index * width:.4g} 20V{20 - value / 5:.3g}h{width:.4g}V20Z"
        for index, value in enumerate(values)
        if value
    )
