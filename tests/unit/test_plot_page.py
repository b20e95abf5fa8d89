"""What `gpulease plot` prints, compared with files kept in tests/golden."""

from dataclasses import replace
from datetime import timedelta, timezone
from pathlib import Path

import pytest

from daemon_stand_in import views
from goldens import compare
from gpulease.cli.chart import Chart, Limit, Times
from gpulease.cli.format import display_width, instant
from gpulease.cli.memory_layers import gpu_layers, job_layers, owner_layers
from gpulease.cli.plot_file import draw_into
from gpulease.cli.plot_page import job_charts, text_of
from gpulease.cli.render import Screen
from gpulease.cli.tables import line
from gpulease.units import GIB, MIB
from gpulease.wire.history import (
    GpuHistoryView,
    JobGpuSeriesView,
    JobMemoryView,
    OwnerSeriesView,
)

NOW = views.NOW.astimezone(timezone(timedelta(hours=1)))
BEGIN = "2026-03-02T09:00:00Z"
USED = [None, *(each * 512 * MIB for each in range(1, 12)), 0, 0]


def job_memory(pool: list[int | None]) -> JobMemoryView:
    gpu = JobGpuSeriesView("GPU-1", "0", 6 * GIB, USED, pool, [None] * len(USED))
    return JobMemoryView(12, "12", BEGIN, 600.0, [gpu])


def gpu_history() -> GpuHistoryView:
    count = len(USED)
    return GpuHistoryView(
        gpu="GPU-1",
        label="0",
        name="NVIDIA A100",
        total=24 * GIB,
        begins_at=BEGIN,
        step=600.0,
        used=[each if each is None else each + GIB for each in USED],
        leased=[8 * GIB] * count,
        committed=[8 * GIB] * count,
        unmanaged=[None, *[GIB] * (count - 1)],
        utilization=[50] * count,
        temperature=[None] * count,
        power=[None] * count,
        owners=[
            OwnerSeriesView("alice", [each and each // 2 for each in USED]),
            OwnerSeriesView(None, [each and each // 2 for each in USED]),
        ],
    )


def gpu_chart(*, by_user: bool) -> Chart:
    view = gpu_history()
    layers = owner_layers(view, colour=False) if by_user else gpu_layers(view)
    times = Times(instant(BEGIN), view.step, NOW.tzinfo)
    return Chart(line("GPU 0", "title"), layers, Limit("all memory", 24 * GIB), times, [])


def charts() -> dict[str, Chart]:
    (plain,) = job_charts(views.running(12), job_memory([None] * len(USED)), NOW)
    pool = [each and each - 256 * MIB for each in USED]
    (pooled,) = job_charts(views.over(12, 0), job_memory(pool), NOW)
    local = Times(instant(BEGIN), 600.0, NOW.tzinfo)
    jobs = {"job": plain, "job-pool": pooled}
    found = {
        name: Chart(each.head, each.layers, each.limit, local, each.below)
        for name, each in jobs.items()
    }
    return {**found, "gpu": gpu_chart(by_user=False), "gpu-users": gpu_chart(by_user=True)}


@pytest.mark.parametrize("name", ["job", "job-pool", "gpu", "gpu-users"])
@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_chart_fits_the_screen(name: str, width: int, ascii_only: bool) -> None:
    text = text_of(charts()[name], Screen(width, colour=False, ascii=ascii_only))

    compare(f"plot-{name}.{width}{'.ascii' if ascii_only else ''}", text)
    assert max(map(display_width, text.splitlines())) <= width
    assert text.isascii() or not ascii_only


def test_several_charts_share_the_height_of_a_terminal() -> None:
    chart = charts()["job"]

    one, of_two = (text_of(chart, Screen(80, colour=False, height=24), n) for n in (1, 2))

    assert 2 * len(of_two.splitlines()) < 24 < 2 * len(one.splitlines())


def test_what_a_gpu_holds_adds_up_to_no_more_than_its_memory() -> None:
    view = replace(gpu_history(), unmanaged=[20 * GIB] * len(USED))

    no_lease, leased, used = gpu_layers(view)

    assert max(each or 0 for each in no_lease.values) == 24 * GIB
    for below, above in ((leased, no_lease), (used, leased)):
        pairs = zip(below.values, above.values, strict=True)
        assert all(one is None or other is None or one <= other for one, other in pairs)


def test_the_uses_of_all_users_lie_above_each_other() -> None:
    layers = owner_layers(gpu_history(), colour=False)

    assert [each.name for each in layers] == ["no lease", "others", "alice"]
    assert [each.letter for each in layers] == ["!", "B", "A"]
    assert layers[0].values[0] is None
    assert layers[0].values[11] == USED[11] + GIB


def test_a_gpu_without_use_has_a_chart_too() -> None:
    count = len(USED)
    idle = replace(gpu_history(), used=[0] * count, unmanaged=[0] * count, owners=[])

    assert [each.name for each in owner_layers(idle, colour=False)] == ["no lease"]


def test_a_limit_that_is_unknown_draws_no_line() -> None:
    chart = charts()["gpu"]

    shown = text_of(
        Chart(chart.head, chart.layers, None, chart.times, []), Screen(60, colour=False)
    )

    assert "all memory" not in shown


def test_unknown_values_and_all_layers_are_drawn_into_files(tmp_path: Path) -> None:
    for name, chart in charts().items():
        path = tmp_path / f"{name}.svg"
        draw_into(path, [chart, chart])
        assert path.stat().st_size > 1000


def test_a_job_with_a_pool_shows_what_it_held_and_what_was_in_use() -> None:
    plain, _ = job_layers(job_memory([None] * len(USED)).gpus[0])
    pooled, limit = job_layers(job_memory(USED).gpus[0])

    assert [each.name for each in plain] == ["used"]
    assert [each.name for each in pooled] == ["held", "in use by its framework"]
    assert limit.value == 6 * GIB
