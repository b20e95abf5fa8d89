"""Series on a regular grid, the use of a GPU by owner, and the spans of jobs."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import NOON
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.memory_series import (
    JOB_SPAN_S,
    Figure,
    Grid,
    JobSpan,
    JobSpans,
    Mean,
    Series,
    Span,
    by_owner,
    grid_over,
    held,
    means_of_owners,
    ranked,
    series_of,
)

AT_S = int(NOON.timestamp())
HOUR = timedelta(hours=1)


@given(
    begin=st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    lasts_s=st.floats(0, 20 * 365 * 86400),
    most=st.integers(2, 1000),
)
def test_a_grid_covers_its_range_in_few_enough_steps(
    begin: datetime, lasts_s: float, most: int
) -> None:
    end = begin + timedelta(seconds=lasts_s)
    grid = grid_over(begin, end, most)
    assert 1 <= grid.points <= most
    assert grid.begin_s <= begin.timestamp()
    assert grid.end_s >= end.timestamp()
    assert grid.begin_s % grid.step_s == 0


@pytest.mark.parametrize(
    ("ago", "most", "step_s", "points"),
    [
        (HOUR, 1000, 5, 720),
        (HOUR, 300, 20, 180),
        (timedelta(days=1), 300, 300, 288),
        (timedelta(days=365), 1000, 43200, 730),
        (timedelta(seconds=1), 300, 1, 1),
        (timedelta(days=3650), 1000, 4 * 86400, 913),
    ],
)
def test_the_step_is_the_finest_that_is_allowed(
    ago: timedelta, most: int, step_s: int, points: int
) -> None:
    grid = grid_over(NOON - ago, NOON, most)
    assert (grid.step_s, grid.points) == (step_s, points)


def test_the_memory_of_a_job_has_no_finer_steps_than_its_spans() -> None:
    grid = grid_over(NOON, NOON + timedelta(seconds=3), 300, JOB_SPAN_S)
    assert grid == Grid(AT_S, 10, 1, AT_S, AT_S + 3)


def series(grid: Grid, *spans: tuple[int, int, int]) -> Series:
    """Return a series of spans, each as seconds after the begin, seconds, and its value."""
    made = [
        Span(grid.begin_s + at_s, lasts_s, held((value,), lasts_s))
        for at_s, lasts_s, value in spans
    ]
    return series_of(grid, made, 1)[0][0]


def test_a_step_has_the_largest_value_that_begins_in_it() -> None:
    assert series(Grid(AT_S, 60, 3), (0, 1, 5), (59, 1, 7), (60, 1, 6)) == [7, 6, None]


def test_a_long_span_is_in_each_of_its_steps_until_another_begins() -> None:
    assert series(Grid(AT_S, 10, 6), (-20, 40, 3), (30, 60, 9)) == [3, 3, None, 9, 9, 9]
    assert series(Grid(AT_S, 1, 4), (0, 60, 3), (2, 60, 1)) == [3, 3, 1, 1]


def test_what_is_unknown_is_no_zero() -> None:
    grid = Grid(AT_S, 10, 2)
    spans = [Span(AT_S, 10, held((None, 4), 4)), Span(AT_S + 5, 5, held((None, 1), 2))]
    unknown, known = series_of(grid, spans, 2)
    assert unknown == ([None, None], Mean([None, None], None))
    assert known == ([4, None], Mean([3.0, None], 3.0)), "4 for 4 s and 1 for 2 s"


def test_a_largest_value_without_a_sum_has_no_mean() -> None:
    old, new = Span(AT_S, 10, (Figure(9),)), Span(AT_S + 10, 10, held((3,), 10))
    ((largest, mean),) = series_of(Grid(AT_S, 10, 2), [old, new], 1)
    assert (largest, mean) == ([9, 3], Mean([None, 3.0], 3.0))


def test_the_mean_of_a_range_leaves_out_what_the_first_step_has_before_it() -> None:
    spans = [Span(AT_S + 10 * n, 10, held((n,), 10)) for n in range(6)]
    for step_s in (10, 20, 60):
        grid = Grid(AT_S, step_s, 60 // step_s, AT_S + 20, AT_S + 50)
        assert series_of(grid, spans, 1)[0][1].overall == 3.0


def test_a_user_without_a_job_in_a_part_of_a_step_used_less_on_average() -> None:
    owners = {"ana": [Span(AT_S, 10, held((6,), 10))], "bob": [Span(AT_S, 30, held((2,), 30))]}
    used = Mean([5.0, 2.0], 3.0)
    ana, bob = means_of_owners(Grid(AT_S, 20, 2), owners, ["bob", "ana"], used, 40)[::-1]
    assert (ana, bob) == (Mean([3.0, 0.0], 1.5), Mean([2.0, 2.0], 1.5))


def test_users_do_not_seem_to_use_less_in_the_present_step_until_the_next_sample() -> None:
    owners = {"ana": [Span(AT_S, 10, held((6,), 10)), Span(AT_S + 20, 10, held((6,), 1))]}
    grid = Grid(AT_S, 20, 2, AT_S, AT_S + 23)
    (ana,) = means_of_owners(grid, owners, ["ana"], Mean([3.0, 6.0], 4.0), 23)
    assert ana.values == [3.0, 6.0]


def test_owners_with_the_most_use_are_named() -> None:
    owners: dict[str, Series] = {"ana": [1, None], "bob": [5, 5], "cyd": [2, 2]}
    named = by_owner([9, 9], owners, ranked(owners), most=1)
    assert named == [("bob", [5, 5]), (None, [3, 2])]


def test_owners_use_no_more_than_the_gpu_does() -> None:
    owners: dict[str, Series] = {"ana": [8, 8, 1], "bob": [4, 4, None]}
    named = by_owner([6, None, 4], owners, ["ana", "bob"])
    assert named == [("ana", [4, None, 1]), ("bob", [2, None, 0])]


def job_span(at_s: int, used: int | None, job: int = 1) -> JobSpan:
    figures = held((used, None, None), 1)
    return JobSpan(GpuUuid("GPU-a"), JobId(job), "alice", AT_S + at_s, figures)


def test_samples_of_a_job_become_one_span_with_the_largest() -> None:
    spans = JobSpans(100)
    for at_s, used in ((1, 3), (9, 7), (4, None), (10, 2)):
        spans.add(job_span(at_s, used))
    found = [(each.at_s - AT_S, each.used) for each in spans.all()]
    assert found == [(0, Figure(7, 10, 2)), (10, Figure(2, 2, 1))]


def test_a_span_is_over_when_no_late_sample_can_belong_to_it() -> None:
    spans = JobSpans(100)
    for at_s in (0, 10, 20):
        spans.add(job_span(at_s, 1))
    assert [each.at_s - AT_S for each in spans.over(NOON + timedelta(seconds=29))] == [0]
    before = NOON - timedelta(seconds=1)
    assert len(spans.over(before)) == 3, "the clock was set back"


def test_what_is_written_is_forgotten_and_of_too_much_the_oldest_is_dropped() -> None:
    spans = JobSpans(2)
    for at_s in (0, 10, 20):
        spans.add(job_span(at_s, 1))
    assert [each.at_s - AT_S for each in spans.all()] == [10, 20]
    spans.written(spans.all()[:1])
    assert [each.at_s - AT_S for each in spans.all()] == [20]
