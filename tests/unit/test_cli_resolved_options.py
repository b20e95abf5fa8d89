"""--begin and --after as they are typed, and elements of arrays that share a row."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon_stand_in import views
from gpulease.cli import job_table, status_page
from gpulease.cli.change_jobs import results
from gpulease.cli.messages import waiting_text
from gpulease.cli.resolved_options import begin_instant, dependencies
from gpulease.cli.show_jobs import array_page as page
from gpulease.cli.tables import draw
from gpulease.client import Client
from gpulease.drawing.arrays import array_of
from gpulease.drawing.words import alike, id_of, ids_of, reason_of
from gpulease.errors import BadValue, NoSuchJob
from gpulease.wire.jobs import (
    ArrayWaitingView,
    EditedJobView,
    EditedView,
    JobList,
    JobView,
    QueueView,
)
from gpulease.wire.text import ranges

SUMMER_NOON = datetime(2026, 7, 1, 10, 0, tzinfo=UTC)
"""In Berlin."""


@pytest.mark.parametrize(
    ("typed", "instant"),
    [
        ("22:00", "2026-07-01T20:00:00+00:00"),
        ("+2h", "2026-07-01T12:00:00+00:00"),
        ("2027-01-31T08:00", "2027-01-31T07:00:00+00:00"),
    ],
)
@pytest.mark.usefixtures("berlin")
def test_a_begin_time_is_the_next_time_of_day_a_span_or_an_instant(
    typed: str, instant: str
) -> None:
    assert begin_instant(typed, SUMMER_NOON) == instant


def _element(number: int, index: int, **fields: object) -> JobView:
    job = views.job(number, user="alice", name="sweep")
    job.label = f"17_{index}"
    job.queue = QueueView(
        "normal", 0, False, None, [], False, False, 17, index, None, 0
    )  # fmt: skip
    for name, value in fields.items():
        setattr(job, name, value)
    return job


class _Listing:
    def __init__(self, *jobs: JobView) -> None:
        self.of = list(jobs)
        self.asked = 0

    def jobs(self, **_: object) -> JobList:
        self.asked += 1
        return JobList(self.of)


def _after(listing: _Listing, *texts: str) -> list[str]:
    return dependencies(cast("Client", listing), texts)


def test_numbers_and_elements_need_no_listing_and_ok_is_the_default() -> None:
    listing = _Listing()
    assert _after(listing, "17,18:any", "19_3:fail") == ["17:ok", "18:any", "19_3:fail"]
    assert listing.asked == 0


def test_a_name_is_the_newest_job_and_that_of_an_array_the_whole_array() -> None:
    listing = _Listing(views.job(4, name="a:b"), views.job(9, name="a:b"), _element(18, 1))
    assert _after(listing, "a:b", "last:any", "sweep:fail") == ["9:ok", "17:any", "17:fail"]
    with pytest.raises(NoSuchJob):
        _after(listing, "other")
    with pytest.raises(BadValue):
        _after(listing, "17,")


def test_elements_share_a_row_while_they_wait_for_the_same_reason() -> None:
    jobs = [
        _element(17, 0, state="active", started_at="2026-07-01T10:00:00Z"),
        *(_element(17 + n, n, reason="no room") for n in (1, 2, 3, 7)),
        _element(30, 8, reason="held"),
        views.job(40, label="40", reason="no room"),
    ]
    assert [ids_of(group) for group in alike(jobs)] == ["17_0", "17_[1-3,7]", "17_8", "40"]


def test_an_element_that_stands_for_others_has_their_row_and_they_count_as_shown() -> None:
    first = _element(17, 0, reason="no room", position=1)
    assert first.queue is not None
    first.queue = replace(first.queue, array_waiting=ArrayWaitingView("0-299", 300))
    jobs = [first, views.job(400, label="400", position=301)]
    assert [ids_of(group) for group in alike(jobs)] == ["17_[0-299]", "400"]
    now = datetime(2026, 7, 1, 10, tzinfo=UTC)
    for waiting, more in ((301, None), (306, "and 5 more")):
        drawn = draw(status_page.page(views.status(jobs=jobs, waiting=waiting), now), None)
        assert ("more: " in drawn) is bool(more)
        assert (more or "17_[0-299]") in drawn


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (("lr=1e-3 seed=0", "lr=1e-3 seed=1", "lr=1e-4 seed=0"), "train.py"),
        (("lr=1e-3 seed=0", "lr=1e-3 seed=1", "lr=1e-3 seed=10"), "train.py lr=1e-3"),
    ],
)
def test_a_row_of_a_grid_is_named_by_what_its_elements_share(
    values: Sequence[str], name: str
) -> None:
    jobs = [replace(_element(17 + n, n), name=f"train.py {it}") for n, it in enumerate(values)]
    assert [group[0].name for group in alike(jobs)] == [name]
    now = datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert array_of(jobs, now).first.name == name
    page = draw(job_table.page(JobList(jobs, total=300), now, newest=True), None)
    assert "17_[...,0-2]" in page


def test_a_row_at_which_a_listing_was_cut_is_marked() -> None:
    jobs = JobList([_element(17 + n, n) for n in range(3)], total=300)
    now = datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert "17_[0-2,...]" in draw(job_table.page(jobs, now), None)
    assert "17_[...,0-2]" in draw(job_table.page(jobs, now, newest=True), None)
    assert "17_[0-2]" in draw(job_table.page(replace(jobs, total=3), now), None)


def test_a_job_that_waits_for_its_begin_time_says_when_that_is() -> None:
    def later(number: int, begin_at: str) -> JobView:
        job = _element(17 + number, number, reason="not before its begin time")
        assert job.queue is not None
        return replace(job, queue=replace(job.queue, blocked_by="begin", begin_at=begin_at))

    now = datetime(2026, 7, 1, 10, tzinfo=UTC)
    jobs = [later(0, "2026-07-01T19:14:00Z"), later(1, "2026-07-01T20:00:00Z")]
    assert [reason_of(job, now) for job in jobs] == ["not before 19:14", "not before 20:00"]
    assert len(alike(jobs)) == 2
    assert "not before 19:14" in waiting_text(jobs[0], None, now)
    assert "not before 20:00" in draw(page(jobs, now), None)


def test_an_edit_shows_begin_times_as_other_commands_do() -> None:
    changes = ["begin none to 2026-07-01T19:14:00+00:00", "name a to 2026-07-01T19:14:00+00:00"]
    view = EditedView(1, [EditedJobView(17, "17", "a", changes)])
    now = datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert results(view, now) == [f"job 17: begin none to 19:14; {changes[1]}"]


def test_a_job_of_an_older_daemon_has_its_number() -> None:
    assert id_of(views.job(5, label="", queue=None)) == "5"


@given(st.sets(st.integers(0, 12)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    said = ranges(sorted(numbers))
    if "..." in said:
        return
    found = [
        number
        for part in said.split(",")
        if part
        for first, _, last in [part.partition("-")]
        for number in range(int(first), int(last or first) + 1)
    ]
    assert found == sorted(numbers)


def test_the_page_of_an_array_counts_states_and_only_the_last_try() -> None:
    over = "2026-07-01T10:05:00Z"
    jobs = [
        _element(17, 0, state="ended", outcome="exited", exit_status=1, ended_at=over),
        _element(18, 1, state="ended", outcome="exited", exit_status=3, ended_at=over),
        _element(19, 2, state="active", started_at="2026-07-01T10:00:00Z"),
        *(_element(18 + n, n, reason="no room") for n in (3, 4)),
        _element(30, 0, state="ended", outcome="exited", exit_status=0, ended_at=over),
    ]
    said = draw(page(jobs, datetime(2026, 7, 1, 10, 6, tzinfo=UTC)), None)
    assert "array 17  sweep" in said
    assert "5: 0-4" in said
    assert "2 queued, 1 running, 1 succeeded, 1 failed" in said
    assert "17_[3-4]" in said
