"""`gpulease extend`: how its line is read, and what it says."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from daemon_stand_in import views
from goldens import sentence
from gpulease.cli.app import call
from gpulease.cli.change_jobs import read_extension as read
from gpulease.cli.change_jobs import result_of_extend as result
from gpulease.errors import BadUsage, BadValue

HOUR = 3600.0
NOW = datetime(2026, 1, 5, 13, 18, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "jobs", "by_s"),
    [
        (["17", "+2h"], ["17"], 2 * HOUR),
        (["17", "sweep-7", "+1d12h"], ["17", "sweep-7"], 36 * HOUR),
        (["last", "-30m"], ["last"], -HOUR / 2),
        (["17", "+01:30:00"], ["17"], 1.5 * HOUR),
        (["+2h"], [], 2 * HOUR),
    ],
)
def test_the_last_word_is_the_time_and_may_have_a_sign(
    words: list[str], jobs: list[str], by_s: float
) -> None:
    assert read(words) == (jobs, by_s)


@pytest.mark.parametrize("words", [["17"], ["+2h", "17"]])
def test_a_number_at_the_end_is_a_job_without_a_time(words: list[str]) -> None:
    with pytest.raises(BadUsage):
        read(words)


@pytest.mark.parametrize("span", ["+", "--2h", ""])
def test_what_is_no_time_is_refused(span: str) -> None:
    with pytest.raises(BadValue):
        read(["17", span])


@pytest.mark.parametrize(
    "line",
    [
        ["17", "-30m"],
        ["17", "-2h"],  # -h is help, but not here
        ["-2h", "17"],
        ["--socket", "/no/such", "17", "-90s"],
    ],
)
def test_less_time_is_not_read_as_an_option(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["--socket", "/no/such", "extend", *line]) == 125
    assert "/no/such" in capsys.readouterr().err


def test_it_says_when_the_job_ends_now() -> None:
    running = replace(views.job(17), expires_at="2026-01-05T16:30:00Z")
    sentence("extend-running", result(running, NOW))


def test_of_a_job_that_waits_it_says_how_long_it_may_run() -> None:
    waiting = views.job(17)
    waiting = replace(waiting, expires_at=None, claim=replace(waiting.claim, time_limit=2.5 * HOUR))
    sentence("extend-waiting", result(waiting, NOW))
