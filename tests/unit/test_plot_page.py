"""What `gpulease plot` prints, compared with files kept in tests/golden."""

from dataclasses import replace
from datetime import timedelta, timezone
from pathlib import Path
from xml.etree import ElementTree

import pytest

from daemon_stand_in import views
from goldens import compare
from gpulease.cli.chart import Chart, Layer, Limit, Times, gpu_layers, owner_layers
from gpulease.cli.plot import about_gpu, job_charts, text_of
from gpulease.cli.plot_file import draw_into
from gpulease.cli.render import Screen
from gpulease.cli.tables import line
from gpulease.drawing.words import display_width, instant
from gpulease.units import GIB, MIB
from gpulease.wire.history import (
    GpuHistoryView,
    JobGpuSeriesView,
    JobMemoryView,
    MeanView,
    OwnerSeriesView,
)

NOW = views.NOW.astimezone(timezone(timedelta(hours=1)))
SVG = "{http://www.w3.org/2000/svg}"
BEGIN = "2026-03-02T09:00:00Z"
USED = [None, *(each * 512 * MIB for each in range(1, 12)), 0, 0]


def mean_of(largest: list[int | None]) -> MeanView:
    """Return means of three quarters of the largest values."""
    means = [None if each is None else each * 0.75 for each in largest]
    known = [each for each in means if each is not None]
    return MeanView([*means], sum(known) / len(known))


def job_memory(pool: list[int | None]) -> JobMemoryView:
    means = {"used": mean_of(USED)}
    gpu = JobGpuSeriesView("GPU-1", "0", 6 * GIB, USED, pool, [None] * len(USED), means)
    return JobMemoryView(12, "12", BEGIN, 600.0, [gpu])


def gpu_history() -> GpuHistoryView:
    count = len(USED)
    found = GpuHistoryView(
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
    )
    for user in ("alice", None):
        half = [each and each // 2 for each in USED]
        found.owners.append(OwnerSeriesView(user, half, mean_of(half)))
    for name in ("used", "utilization"):
        found.means[name] = mean_of(getattr(found, name))
    for name in ("leased", "committed", "unmanaged"):
        series = getattr(found, name)
        found.means[name] = MeanView([*series], 4.0 * GIB)
    return found


def gpu_chart(*, by_user: bool) -> Chart:
    view = gpu_history()
    layers = owner_layers(view, colour=False) if by_user else gpu_layers(view)
    times = Times(instant(BEGIN), view.step, NOW.tzinfo)
    limit = Limit("all memory", 24 * GIB)
    return Chart(line("GPU 0", "title"), layers, limit, times, [*about_gpu(view)])


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


def test_a_job_with_a_range_is_compared_with_both_ends() -> None:
    job = views.running(12)
    (lease, *_) = job.leases
    job.leases = [replace(lease, gpu="GPU-1", memory=2 * GIB, memory_bound=6 * GIB)]
    (chart,) = job_charts(job, job_memory([None] * len(USED)), NOW)
    assert "5.5G of 2G..6G" in chart.below[0]


@pytest.mark.parametrize("name", ["job", "job-pool", "gpu", "gpu-users"])
@pytest.mark.parametrize(("width", "ascii_only"), [(80, False), (40, True)])
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
    count = len(USED)
    view = replace(gpu_history(), unmanaged=[20 * GIB] * count, means={})

    no_lease, leased, used = gpu_layers(view)

    assert max(each or 0 for each in no_lease.values) == 24 * GIB
    for below, above in ((leased, no_lease), (used, leased)):
        pairs = zip(below.values, above.values, strict=True)
        assert all(one is None or other is None or one <= other for one, other in pairs)


def test_the_uses_of_all_users_lie_above_each_other() -> None:
    layers = owner_layers(gpu_history(), colour=False)

    assert [each.name for each in layers] == ["peak of use", "no lease", "others", "alice"]
    assert [each.letter for each in layers] == [".", "!", "B", "A"]
    assert layers[1].values[0] is None
    assert layers[0].values[11] == USED[11] + GIB
    assert layers[1].values[11] == pytest.approx(0.75 * USED[11] + GIB, abs=2)


def test_an_older_daemon_has_no_means_and_its_largest_values_are_not_called_so() -> None:
    view = replace(gpu_history(), means={})
    view.owners = [replace(each, mean=None) for each in view.owners]

    assert "average" not in "".join(about_gpu(view))
    assert "peak of use" not in {each.name for each in gpu_layers(view)}


def test_a_mean_of_a_part_of_the_time_is_called_so() -> None:
    view = gpu_history()
    view.means["utilization"].values[3] = None

    *_, busy = about_gpu(view)
    assert busy == "utilization: at most 50%, 38% on average where it is known"


@pytest.mark.parametrize("name", ["job", "job-pool", "gpu", "gpu-users"])
def test_all_layers_are_drawn_into_files(name: str, tmp_path: Path) -> None:
    found = charts()[name]
    chart = Chart(line("a<b & c"), found.layers, found.limit, found.times, [])
    svg, png = tmp_path / "use.svg", tmp_path / "use.PNG"
    draw_into(svg, [chart, chart])
    draw_into(png, [chart, chart])

    assert png.stat().st_size > 1000
    root = ElementTree.parse(svg).getroot()
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts.count("a<b & c") == 2
    assert chart.limit is not None
    for each in (*chart.layers, chart.limit):
        assert texts.count(each.name) == 2
    areas = [each for each in root.iter(f"{SVG}path") if each.get("vector-effect")]
    assert len(areas) == 2 * (len(chart.layers) + 1)
    assert ("4G" if "job" in name else "16G") in texts
    # Nothing of the job was recorded in the first of 14 steps.
    assert areas[0].get("d", "").startswith("M71.4286 " if "job" in name else "M")


def test_a_chart_without_a_known_value_is_a_title_alone(tmp_path: Path) -> None:
    chart = charts()["gpu"]
    unknown = Layer("used", [None] * len(USED), "used", "█", "#")
    draw_into(tmp_path / "use.svg", [Chart(chart.head, [unknown], None, chart.times, [])])
    root = ElementTree.parse(tmp_path / "use.svg").getroot()
    assert [each.text for each in root.iter(f"{SVG}text")] == ["GPU 0"]
