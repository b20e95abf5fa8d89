"""`gpulease list` where the daemon has more jobs than one answer has."""

import json
import re
from collections.abc import Callable, ItemsView
from dataclasses import replace
from typing import Any

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.terminal import Terminal, gpulease
from gpulease.cli.app import call
from gpulease.errors import EXIT_USAGE
from gpulease.wire.jobs import JobView, QueueView

List = Callable[..., dict[str, Any]]


@pytest.fixture
def daemon(daemon: StandIn) -> StandIn:
    """Serve nine ended jobs, of which the even ones were cancelled, in answers of four."""
    daemon.most_listed = 4
    for number in range(1, 10):
        job = views.over(number, 1)
        daemon.jobs[number] = job if number % 2 else replace(job, outcome="cancelled")
    return daemon


@pytest.fixture
def listed(daemon: StandIn, capsys: pytest.CaptureFixture[str]) -> List:
    def listed(*options: str) -> dict[str, Any]:
        assert call(["--socket", str(daemon.path), "list", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        return found | {"jobs": [job["id"] for job in found["jobs"]]}

    return listed


def test_limit_all_lists_more_than_one_answer_has(listed: List) -> None:
    assert listed("--all", "--limit", "all") == {"jobs": [*range(1, 10)], "total": 9, "next": None}


def test_one_answer_says_that_there_is_more(listed: List) -> None:
    assert listed("--all") == {"jobs": [6, 7, 8, 9], "total": 9, "next": 6}


def test_a_filter_looks_at_all_jobs(listed: List) -> None:
    assert listed("--state", "cancelled") == {"jobs": [2, 4, 6, 8], "total": 4, "next": None}


def test_a_filter_is_applied_by_the_daemon(daemon: StandIn, listed: List) -> None:
    found = listed("--state", "cancelled", "--limit", "2")
    assert found == {"jobs": [6, 8], "total": 4, "next": 6}
    assert len(daemon.asked) == 1


class _Replanned(dict[int, JobView]):
    """Jobs that wait for something else at each look."""

    looks = 0

    def items(self) -> ItemsView[int, JobView]:
        self.looks += 1
        return {id: replace(job, reason=f"{self.looks}") for id, job in super().items()}.items()


def test_an_array_has_one_row_although_its_reason_changes_between_two_answers(
    daemon: StandIn,
) -> None:
    """A terminal has a hundred rows, and more jobs are read where fewer rows are needed."""
    daemon.jobs = _Replanned(
        {
            id: replace(
                views.waiting(),
                id=id,
                queue=QueueView("normal", 0, False, None, [], False, False, 1, id - 1, None, 0),
            )
            for id in range(1, 251)
        }
    )
    terminal = Terminal(gpulease(daemon.path, "list"), size=(50, 100))
    assert terminal.finish() == 0
    assert re.findall(r"1_\S+", terminal.shown) == ["1_[0-249]"]


def test_a_name_that_is_no_utf_8_is_refused(
    daemon: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--socket", str(daemon.path), "cancel", "--name", "\udcff"]
    assert call(line) == EXIT_USAGE
    assert "'\\udcff'" in capsys.readouterr().err
