"""The figures of a replay, on traces that can be checked by hand."""

import pytest

from gpulease.replay.metrics import by_user, figures, in_use, jain, percentile
from gpulease.replay.trace import Run, Server, TraceJob
from gpulease.units import GIB

TWO_GPUS = [Server(2, 4 * GIB)]


def ran(
    number: int, submit: float, start: float, end: float, user: str = "a", gpus: int = 1
) -> Run:
    """Return a run of a job that asks for half of a GPU, on as many GPUs."""
    job = TraceJob(number, submit, end - start, gpus, 2 * GIB, user)
    return Run(job, start, end, 0, tuple(range(gpus)))


def test_waits_and_completions() -> None:
    found = figures([ran(1, 0, 0, 10), ran(2, 0, 10, 20), ran(3, 5, 35, 40)], TWO_GPUS)

    assert found.mean_wait_s == pytest.approx(40 / 3)
    assert (found.median_wait_s, found.p95_wait_s, found.longest_wait_s) == (10, 30, 30)
    assert found.mean_completion_s == pytest.approx((10 + 20 + 35) / 3)
    assert found.makespan_s == 40


def test_utilization_is_the_memory_asked_for_of_all_memory_over_the_makespan() -> None:
    # 2 of 8 GiB for 10 of 20 s, 4 of 8 GiB for 5 of 20 s.
    found = figures([ran(1, 0, 0, 10), ran(2, 10, 15, 20, gpus=2)], TWO_GPUS)

    assert found.memory_utilization == pytest.approx(0.25 * 0.5 + 0.5 * 0.25)


def test_fragmentation_is_the_free_memory_while_jobs_wait() -> None:
    # From 2 to 10 s one job waits, and 6 of 8 GiB are free.
    waited = figures([ran(1, 0, 0, 10), ran(2, 2, 10, 12)], TWO_GPUS)
    nobody = figures([ran(1, 0, 0, 10)], TWO_GPUS)

    assert waited.fragmentation == pytest.approx(0.75)
    assert nobody.fragmentation == 0


def test_the_speed_of_a_user_is_run_time_over_wait_and_run_time() -> None:
    users = by_user([ran(1, 0, 0, 10, "b"), ran(2, 0, 30, 40, "a"), ran(3, 0, 0, 10, "b")])

    assert [(user.user, user.jobs, user.speed) for user in users] == [("a", 1, 0.25), ("b", 2, 1)]
    assert users[0].longest_wait_s == 30


def test_jains_index_is_one_if_all_are_equal_and_one_nth_if_one_has_all() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([1, 0.5]) == pytest.approx(2.25 / 2.5)


def test_a_percentile_is_a_value_that_occurs() -> None:
    values = list(map(float, range(1, 101)))

    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 99) == 7


def test_jobs_that_take_no_time_count() -> None:
    found = figures([ran(1, 5, 5, 5)], TWO_GPUS)

    assert (found.makespan_s, found.memory_utilization, found.jain_index) == (0, 0, 1)


def test_a_gpu_with_two_jobs_is_in_use_once() -> None:
    busy = in_use([ran(1, 0, 0, 10), ran(2, 0, 5, 10), ran(3, 0, 10, 12, gpus=2)])

    assert [(at, count) for at, count in busy if at != 5] == [(0, 1), (10, 2), (12, 0)]
