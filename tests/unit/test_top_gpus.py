"""The GPUs of `gpulease top`: how they are arranged, their bars, and their last minutes."""

from dataclasses import replace
from typing import Any

import pytest

from daemon_stand_in import views
from gpulease.cli.chart import owner_style
from gpulease.cli.top.gpus import (
    PANEL,
    STEP_S,
    Layout,
    Trend,
    Trends,
    bar,
    gpu_lines,
    layout,
    shown_gpus,
    sparkline,
)
from gpulease.cli.top.lines import ascii_only, plain, width_of
from gpulease.units import GIB
from gpulease.wire.jobs import JobView, LeaseView
from gpulease.wire.machine import GpuView

NOW = 1_000_000.0


def holder(number: int, user: str, leased: int, used: int, **changed: Any) -> JobView:
    leases = [LeaseView(views.FIRST, leased * GIB, used * GIB, None, [])]
    return views.running(number, user=user, leases=leases, **changed)


def drawn(gpu: GpuView, *jobs: JobView, width: int = 24) -> str:
    (shown,) = shown_gpus(views.status(gpus=[gpu], jobs=list(jobs)), {})
    return ascii_only(plain(bar(shown, width)))


def gpu(unmanaged: int = 0, **changed: Any) -> GpuView:
    memory = views.memory(unmanaged=unmanaged * GIB)
    return views.gpu(0, views.FIRST, **({"memory": memory} | changed))


@pytest.mark.parametrize(
    ("count", "width", "height", "expected"),
    [
        (8, 80, 24, Layout(1, 80, has_panels=False)),
        (8, 200, 50, Layout(2, 99, has_panels=True)),
        (1, 80, 24, Layout(1, 80, has_panels=True)),
        (4, 80, 24, Layout(1, 80, has_panels=True)),
        (64, 80, 24, Layout(6, 11, has_panels=False)),
        (8, 50, 12, Layout(4, 11, has_panels=False)),
        (2, 20, 5, Layout(1, 20, has_panels=False)),
    ],
)
def test_gpus_take_at_most_half_of_the_screen_and_less_of_a_small_one(
    count: int, width: int, height: int, expected: Layout
) -> None:
    assert layout(count, width, height) == expected


def test_a_bar_shows_used_leased_unmanaged_and_free_memory_by_owner() -> None:
    jobs = (holder(1, "ana", 8, 4), holder(2, "bob", 6, 2))
    assert drawn(gpu(unmanaged=2), *jobs) == "####ana=##bob=!!........"
    (shown,) = shown_gpus(views.status(gpus=[gpu(unmanaged=2)], jobs=list(jobs)), {})
    assert plain(bar(shown, 24)) == "████ana▒██bob▒▚▚░░░░░░░░"


def test_the_jobs_of_one_user_share_a_piece() -> None:
    assert (
        drawn(gpu(), holder(1, "ana", 4, 4), holder(2, "ana", 8, 0)) == "####ana=====............"
    )


def test_a_name_leaves_room_for_what_its_owner_has() -> None:
    jobs = (holder(1, "alexander", 2, 1), holder(2, "b", 1, 1))
    assert drawn(gpu(), *jobs) == "#=#....................."


def test_use_over_the_lease_is_drawn_as_used() -> None:
    assert drawn(gpu(), holder(1, "ana", 4, 8)) == "#ana####................"


def test_unknown_memory_is_not_free_memory() -> None:
    unknown = gpu(memory=views.memory(total=None, used=None))
    assert drawn(unknown, width=5) == "?????"


def test_the_rest_of_a_drained_or_exclusive_gpu_does_not_look_free() -> None:
    assert drawn(gpu(state="drained"), holder(1, "ana", 8, 4)) == "####ana=////////////////"
    alone = holder(1, "ana", 4, 4, claim=views.claim(exclusive=True))
    (shown,) = shown_gpus(views.status(gpus=[gpu()], jobs=[alone]), {})
    assert {style.removesuffix("-name") for _, style in bar(shown, 24)} == {owner_style("ana")}


def test_a_note_replaces_figures_and_never_shortens_the_bar() -> None:
    noted = replace(gpu(), index=1, kept_for=1234)
    shown = shown_gpus(views.status(gpus=[gpu(), noted]), {})
    lines = [plain(line) for line in gpu_lines(shown, Layout(1, 60, False), NOW)]
    assert lines[0].count("░░") == lines[1].count("░░") == 11
    assert "kept for job 1234" in lines[1]


@pytest.mark.parametrize("width", [39, 80, 200])
@pytest.mark.parametrize("has_panels", [True, False])
def test_every_line_of_a_gpu_has_the_width_of_its_place(width: int, has_panels: bool) -> None:
    gpus = [*views.busy_status().gpus, gpu(power=251.3, power_limit=400.0, kept_for=1234)]
    shown = shown_gpus(replace(views.busy_status(), gpus=gpus), {})
    lines = gpu_lines(shown, Layout(1, width, has_panels), NOW)
    assert len(lines) == len(gpus) * (PANEL if has_panels else 1)
    assert {width_of(line) for line in lines} == {width}


def test_gpus_stand_in_columns_from_top_to_bottom() -> None:
    gpus = [views.gpu(index, f"GPU-{index}") for index in range(5)]
    lines = gpu_lines(shown_gpus(views.status(gpus=gpus), {}), Layout(2, 39, False), NOW)
    indexes = [[word for word in plain(line).split() if word.isdecimal()] for line in lines]
    assert indexes == [["0", "3"], ["1", "4"], ["2"]]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"kept_for": 5}, "kept for job 5"),
        ({"kept_for": 12, "kept_for_label": "8_1"}, "kept for job 8_1"),
        ({"state": "drained"}, "drained"),
        ({"state": "unreadable"}, "unreadable"),
        ({"slurm": True}, "assigned by Slurm"),
    ],
)
@pytest.mark.parametrize("has_panels", [True, False])
def test_a_gpu_says_why_it_takes_no_job(
    changed: dict[str, Any], word: str, has_panels: bool
) -> None:
    shown = shown_gpus(views.status(gpus=[gpu(**changed)]), {})
    lines = gpu_lines(shown, Layout(1, 80, has_panels), NOW)
    assert word in plain(lines[0])


def test_a_panel_shows_temperature_power_and_the_last_minutes() -> None:
    trends = Trends()
    for ago in range(3):
        trends.see(gpu(utilization=90 - 40 * ago), NOW - ago * STEP_S)
    power = gpu(power=251.3, power_limit=400.0)
    title, memory, minutes = gpu_lines(
        shown_gpus(views.status(gpus=[power]), {views.FIRST: trends}),
        Layout(1, 90, True),
        NOW,
    )
    assert plain(title).endswith(" 64C 251W of 400W")
    assert plain(memory).endswith("7G used  15.5G free of 24G  ")
    assert plain(minutes).split() == ["util", "87%", "▁▅█", "memory", "▃▃▃"]


def test_a_trend_keeps_the_largest_value_of_each_step() -> None:
    trend = Trend()
    for at, value in ((0, 5), (3, 50), (9, 20), (10, 7), (35, None)):
        trend.put(at, value)
    assert trend.last(4, 39) == [50, 7, None, None]


def test_a_trend_is_filled_from_coarser_history() -> None:
    trend = Trend()
    trend.fill(0, 2.0 * STEP_S, [10, None, 30])
    assert trend.last(6, 5 * STEP_S) == [10, 10, None, None, 30, 30]


def test_a_sparkline_leaves_unknown_steps_empty() -> None:
    assert sparkline([0, None, 50, 100, 120]) == "▁ ▅██"


def test_a_trend_of_memory_is_a_share_of_the_gpu() -> None:
    trends = Trends()
    trends.see(gpu(memory=views.memory(total=20 * GIB, used=5 * GIB)), NOW)
    trends.see(replace(gpu(), memory=views.memory(total=None, used=None)), NOW + STEP_S)
    assert trends.memory.last(2, NOW + STEP_S) == [25.0, None]
