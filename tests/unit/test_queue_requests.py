"""What a request asks of the queue: indices of arrays, dependencies, begin times, privileges."""

from datetime import UTC, datetime

import pytest

from goldens import mentions
from gpulease.domain.gpu import JobId
from gpulease.domain.queue_options import Condition, Indices, Priority, WantedDependency
from gpulease.errors import BadValue, NotAllowed
from gpulease.server.validation import (
    dependencies_of,
    indices_of,
    instant_of,
    queue_options_of,
)
from gpulease.wire.requests import MOST_ELEMENTS, QueueRequest


@pytest.mark.parametrize(
    ("written", "indices", "most"),
    [
        ("0-3", (0, 1, 2, 3), None),
        ("5,1,3", (1, 3, 5), None),
        ("0-30:10", (0, 10, 20, 30), None),
        ("0-2,2-4%2", (0, 1, 2, 3, 4), 2),
        ("7", (7,), None),
    ],
)
def test_indices_are_written_as_slurm_writes_them(
    written: str, indices: tuple[int, ...], most: int | None
) -> None:
    assert indices_of(written) == Indices(indices, most)


@pytest.mark.parametrize(
    "written",
    ["", "a", "3-1", "0-3:0", "1,,2", "-1", "0-5%0", "0-5%", "0-5%x", "1000000", "0-999999", "٣"],
)
def test_what_is_no_array_or_too_large_is_refused(written: str) -> None:
    with pytest.raises(BadValue):
        indices_of(written)


def test_an_array_may_have_ten_thousand_elements_and_no_more() -> None:
    largest = indices_of(f"1-{MOST_ELEMENTS}")
    assert largest is not None
    assert len(largest.indices) == MOST_ELEMENTS
    with pytest.raises(BadValue):
        indices_of(f"0-{MOST_ELEMENTS}")


def test_dependencies_name_jobs_arrays_and_elements_with_ok_as_the_default() -> None:
    assert dependencies_of(["17", "17_3:any", "18:fail", "17"]) == (
        WantedDependency(JobId(17)),
        WantedDependency(JobId(17), 3, Condition.ANY),
        WantedDependency(JobId(18), None, Condition.FAIL),
    )


@pytest.mark.parametrize("written", ["", "x", "17:", "17:done", "17_", "_3", "17_3_4", "-1", "1 2"])
def test_what_is_no_dependency_is_refused(written: str) -> None:
    with pytest.raises(BadValue):
        dependencies_of([written])


def test_a_begin_time_needs_a_time_zone_and_is_kept_in_utc() -> None:
    at = instant_of("queue.begin_at", "2027-01-31T22:00:00+01:00")
    assert at == datetime(2027, 1, 31, 21, tzinfo=UTC)
    for written in ("2027-01-31T22:00:00", "tonight", "0001-01-01T00:00:00+14:00"):
        with pytest.raises(BadValue):
            instant_of("queue.begin_at", written)


def test_only_admins_go_before_others() -> None:
    for asked in (QueueRequest(priority="high"), QueueRequest(nice=-1)):
        with pytest.raises(NotAllowed):
            queue_options_of(asked, is_admin=False)
    asked = QueueRequest(priority="high", nice=-20, held=True, requeue=True, preemptible=True)
    options = queue_options_of(asked, is_admin=True)
    assert (options.priority, options.nice, options.held) == (Priority.HIGH, -20, True)
    assert options.requeue
    assert options.preemptible
    with pytest.raises(BadValue) as refused:
        queue_options_of(QueueRequest(nice=20), is_admin=True)
    assert mentions(refused.value.message, "20", "-20", "19")
    assert mentions(refused.value.hint, "0 to 19", "admins")
