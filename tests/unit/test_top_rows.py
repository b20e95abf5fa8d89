"""The rows of `gpulease top`: what is shown, in which order, and as which text."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from daemon_stand_in import views
from gpulease.cli.top.lines import plain
from gpulease.cli.top.rows import Listing
from gpulease.cli.top.sections import (
    SORT_COLUMNS,
    Filter,
    Sort,
    key_of,
    matches,
    parse_filter,
    sections,
)
from gpulease.drawing.words import display_width, labels_of
from gpulease.errors import BadUsage
from gpulease.units import GIB
from gpulease.wire.jobs import ArrayWaitingView, JobView, LeaseView, QueueView
from gpulease.wire.machine import StatusView

ALL = Filter()
NOON, SOON = "2026-03-02T12:00:00Z", "2026-03-02T14:05:30Z"
USUAL = Sort()


def lease(gpu: str = views.FIRST, memory: int = 6 * GIB, **changed: Any) -> LeaseView:
    return replace(LeaseView(gpu, memory, 5 * GIB, 5 * GIB, []), **changed)


def keys(view: StatusView, wanted: Filter = ALL, order: Sort = USUAL) -> list[tuple[str, int]]:
    return [key_of(item) for each in sections(view, wanted, order) for item in each.items]


def text(view: StatusView, width: int = 100) -> list[str]:
    """Return the rows of all sections as they are drawn."""
    lines = []
    for section in sections(view, ALL, USUAL):
        listing = Listing(section, width, labels_of(view.gpus), views.NOW)
        lines += [section.title, plain(listing.heading(USUAL))]
        lines += [plain(listing.line(item)).rstrip() for item in section.items]
    return lines


@pytest.mark.parametrize("width", [30, 40, 50, 60])
def test_a_cell_without_room_ends_in_a_mark_however_narrow_the_terminal_is(width: int) -> None:
    view = views.busy_status()
    for job in view.jobs:
        job.claim = replace(job.claim, memory=GIB * 1025 // 10, memory_bound=GIB * 2057 // 10)
    for narrow, whole in zip(text(view, width), text(view, 200), strict=True):
        assert display_width(narrow) <= width
        assert narrow.endswith("…") or narrow.split()[-1] in whole.split()


def test_jobs_come_first_then_strangers_then_the_queue() -> None:
    assert keys(views.busy_status()) == [("job", 12), ("pid", 3131), ("job", 17), ("job", 18)]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", Filter()),
        ("  bert  ", Filter(text="bert")),
        ("user=bob gpu=0:1", Filter("bob", "0:1")),
        ("Sweep user=bob S=3x", None),
        ("Sweep B", Filter(text="sweep b")),
    ],
)
def test_a_filter_is_read_from_words(words: str, wanted: Filter | None) -> None:
    if wanted is None:
        with pytest.raises(BadUsage):
            parse_filter(words)
    else:
        assert parse_filter(words) == wanted


def test_a_filter_is_written_as_it_is_read() -> None:
    for wanted in (Filter(), Filter("bob", "1", "sweep"), Filter(gpu="0:1")):
        assert parse_filter(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("user=alice", [("job", 12)]),
        ("user=bob", [("pid", 3131)]),
        ("gpu=0", [("job", 12), ("pid", 3131)]),
        ("notebook", [("pid", 3131)]),
        ("20g free", [("job", 17)]),
        ("user=carol gpu=0", []),
    ],
)
def test_a_filter_hides_what_does_not_match(words: str, found: list[tuple[str, int]]) -> None:
    assert keys(views.busy_status(), parse_filter(words)) == found


def test_a_waiting_job_matches_the_gpus_that_it_names() -> None:
    job = views.job(3, claim=views.claim(named=[views.SECOND]))
    assert matches(job, Filter(gpu="1"), {views.SECOND: "1"})
    assert not matches(job, Filter(gpu="0"), {views.SECOND: "1"})


def test_a_title_counts_what_the_filter_hides_and_what_was_not_asked_for() -> None:
    view = replace(views.busy_status(), waiting=40)
    titles = [each.title for each in sections(view, ALL, USUAL)]
    assert titles == ["RUNNING 1", "WITHOUT A LEASE 1", "WAITING 40"]
    titles = [each.title for each in sections(view, Filter("carol"), USUAL)]
    assert titles == ["RUNNING 0 of 1", "WITHOUT A LEASE 0 of 1", "WAITING 1 of 40"]


def test_rows_that_stand_for_an_array_count_as_its_jobs() -> None:
    queue = QueueView(
        "normal", 0, False, None, [], False, False, 5, 3, None, 0,
        array_waiting=ArrayWaitingView("3-99", 97),
    )  # fmt: skip
    view = views.status(jobs=[views.job(8, queue=queue)], waiting=97)
    assert sections(view, ALL, USUAL)[-1].title == "WAITING 97"
    assert sections(view, Filter("nobody"), USUAL)[-1].title == "WAITING 0 of 97"
    assert "5_[3-99]" in text(view)[-1]


def jobs_to_sort() -> StatusView:
    def job(
        number: int, user: str, gpu: str, used: int, ends: str | None, busy: int | None, hour: int
    ) -> JobView:
        leases = [lease(gpu, used=used * GIB)]
        return views.running(number, user=user, name=f"n{9 - number}", leases=leases,
                             expires_at=ends, utilization=busy,
                             started_at=f"2026-03-02T{hour:02}:00:00Z")  # fmt: skip

    return views.status(
        gpus=[views.gpu(0, views.FIRST), views.gpu(1, views.SECOND)],
        jobs=[
            job(1, "bob", views.SECOND, 1, "2026-03-02T18:00:00Z", 10, 11),
            job(2, "ana", views.FIRST, 4, None, None, 9),
            job(3, "eve", views.SECOND, 2, "2026-03-02T15:00:00Z", 95, 10),
        ],
    )


@pytest.mark.parametrize(
    ("column", "numbers"),
    [
        ("usual", [1, 2, 3]),
        ("job", [1, 2, 3]),
        ("user", [2, 1, 3]),
        ("name", [3, 2, 1]),
        ("gpu", [2, 1, 3]),
        ("memory", [2, 3, 1]),
        ("util", [3, 1, 2]),
        ("ran", [2, 3, 1]),
        ("time", [3, 1, 2]),
    ],
)
def test_rows_are_sorted_by_any_column(column: Any, numbers: list[int]) -> None:
    view = jobs_to_sort()
    assert [number for _, number in keys(view, order=Sort(column))] == numbers
    assert [number for _, number in keys(view, order=Sort(column, True))] == numbers[::-1]


def test_the_keys_for_sorting_go_round_all_columns() -> None:
    order, seen = Sort(), []
    for _ in SORT_COLUMNS:
        seen.append(order.column)
        order = order.other(1)
    assert (tuple(seen), order) == (SORT_COLUMNS, Sort())
    assert Sort().other(-1) == Sort("time")


def test_the_listing_says_what_status_says() -> None:
    assert [" ".join(line.split()) for line in text(views.busy_status())] == [
        "RUNNING 1",
        "JOB user name gpu uses lease util ran left",
        "12 alice resnet-50-with-…ather-long-name 0 5G 6G 34m 3h 25m",
        "WITHOUT A LEASE 1",
        "PID user command gpu uses age",
        "3131 bob notebook.py (in container 3f2a9c51d0e7) 0 2G 1d 2h",
        "WAITING 2",
        "PLACE^ job user name asks starts",
        "1 17 carol train.py 2 x 20G in 1-10 h, after job 12",
        "2 18 dave train.py 40% exclusive job 17 is first",
    ]


@pytest.mark.parametrize("width", [200, 60])
def test_rows_fit_the_width(width: int) -> None:
    assert all(len(line) <= width for line in text(views.busy_status(), width))


def test_long_names_keep_their_ends() -> None:
    jobs = [views.running(each, name=f"sweep batch=16 epochs=30 seed={each}") for each in (7, 8)]
    rows = text(views.status(jobs=jobs), width=80)
    assert "seed=7" in rows[2]
    assert "seed=8" in rows[3]


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "3h 25m"),
        ({"suspended": True}, "suspended"),
        ({"hook": "failed"}, "no framework limit"),
        ({"leases": [lease(over_since_at="2026-03-02T14:04:00Z")]}, "over"),
        ({"leases": [lease(), lease(over_since_at=NOON, stops_at=SOON)]}, "over, stops in 30s"),
        (
            {"leases": [lease(memory_bound=20 << 30, over_since_at=NOON, stops_at=SOON)]},
            "asked back, stops in 30s",
        ),
        ({"state": "releasing"}, "releasing"),
        ({"idle_ends_at": "2026-03-02T14:10:00Z"}, "idle, ends in 5m"),
        ({"idle_since_at": "2026-03-02T12:05:00Z"}, "idle for 2h"),
        ({"idle_since_at": "2026-03-02T13:06:00Z"}, "3h 25m"),
    ],
)
def test_a_row_shows_what_is_about_to_happen_to_a_job(changed: dict[str, Any], state: str) -> None:
    view = views.status(jobs=[views.running(12, **changed)])
    assert text(view)[2].endswith(state)


def test_a_job_on_several_gpus_has_one_row_with_the_sum() -> None:
    job = views.running(12, leases=[lease(), lease(views.SECOND, used=None)])
    view = views.status(gpus=[views.gpu(0), views.gpu(1, views.SECOND)], jobs=[job])
    assert text(view)[2].split()[3:6] == ["0,1", "5G", "12G"]


@pytest.mark.parametrize(
    ("left", "shown"),
    [(-5, "0s"), (59, "59s"), (61, "1m"), (3699, "1h 1m"), (86400 + 7259, "1d 2h")],
)
def test_the_time_left_changes_once_a_minute(left: int, shown: str) -> None:
    ends = (views.NOW + timedelta(seconds=left)).isoformat()
    assert text(views.status(jobs=[views.running(12, expires_at=ends)]))[2].endswith(f" {shown}")
