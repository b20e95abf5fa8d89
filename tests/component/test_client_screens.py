"""What the looking verbs show: on terminals of every kind, in pipes, and of every kind of job."""

import json
import os
import re
import subprocess
from dataclasses import replace

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.terminal import REPOSITORY, Terminal, gpulease
from goldens import mentions
from gpulease.cli.render import screen_of
from gpulease.drawing.words import display_width
from gpulease.wire.machine import CheckView, DoctorView

LOOKS = (("status",), ("list", "--all"), ("show", "12"), ("doctor",))


@pytest.fixture
def daemon(daemon: StandIn) -> StandIn:
    daemon.status = views.busy_status()
    for job in (
        views.over(9, 1, name="eval"),
        views.over(10, 124, outcome="time_limit"),
        views.over(11, None, outcome="cancelled"),
        views.over(13, 0),
        views.over(14, None, outcome="released", kind="hold", name="hold"),
        views.running(12),
        views.waiting(),
    ):
        daemon.jobs[job.id] = job
    daemon.doctor = DoctorView([CheckView("driver", "failure", "it is gone", "load it")])
    return daemon


def run(daemon: StandIn, *line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TZ": "UTC", **variables}
    return subprocess.run(
        gpulease(daemon.path, *line), env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def screen(daemon: StandIn, *line: str, columns: int = 120, **environment: str) -> str:
    terminal = Terminal(gpulease(daemon.path, *line), size=(50, columns), **environment)
    assert terminal.finish() in (0, 1), terminal.shown
    return terminal.shown.replace("\r\n", "\n")


def without_minutes(text: str) -> str:
    """Drop what differs between two looks: clocks, and spans up to now."""
    return re.sub(r"\d+[dhms]\b|\d\d:\d\d| +|-{2,}", " ", text)


@pytest.mark.parametrize("line", LOOKS, ids="-".join)
@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_that_wants_none_gets_what_a_pipe_gets(
    daemon: StandIn, line: tuple[str, ...], plain: dict[str, str]
) -> None:
    shown = screen(daemon, *line, columns=300, **plain)
    assert "\x1b" not in shown
    assert without_minutes(shown) == without_minutes(run(daemon, *line).stdout)


@pytest.mark.parametrize(
    ("variables", "shows_blocks"),
    [
        ({}, True),
        ({"LC_ALL": "", "LC_CTYPE": "en_US.utf8", "LANG": "C"}, True),
        ({"LANG": "C"}, False),
        ({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, False),
        ({"LANG": "C.UTF-8", "TERM": "linux"}, False),
    ],
    ids=str,
)
def test_the_locale_decides_what_bars_are_drawn_with(
    variables: dict[str, str], shows_blocks: bool
) -> None:
    assert screen_of(None, variables).ascii is not shows_blocks


@pytest.mark.parametrize("line", LOOKS, ids="-".join)
def test_a_pipe_is_as_wide_as_columns_says_and_coloured_where_forced(
    daemon: StandIn, line: tuple[str, ...]
) -> None:
    # watch(1) reads a pipe, and sets COLUMNS to the width of its terminal.
    plain = run(daemon, *line, COLUMNS="60").stdout
    coloured = run(daemon, *line, COLUMNS="60", FORCE_COLOR="1").stdout
    assert without_minutes(plain) == without_minutes(
        screen(daemon, *line, columns=60, NO_COLOR="1")
    )
    assert max(map(display_width, plain.splitlines())) <= 60
    assert "\x1b[" in coloured and "\x1b" not in plain


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("line", LOOKS, ids="-".join)
def test_no_line_is_wider_than_the_terminal(
    daemon: StandIn, line: tuple[str, ...], columns: int
) -> None:
    long = "the reason has many words, such as rhinoceros, and each of them is of importance"
    waiting = replace(views.waiting(), reason=long)
    daemon.status.jobs[1] = daemon.jobs[17] = waiting
    daemon.jobs[12] = views.running(12, state="releasing", reason=long)
    shown = screen(daemon, *line, columns=columns)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(display_width, bare.splitlines())) <= columns
    if line[0] == "show":
        assert set(long.split()) <= set(bare.replace(";", " ").split()), bare


def test_errors_break_between_words(daemon: StandIn) -> None:
    command = gpulease(daemon.path, "list", "--state", "gone")
    terminal = Terminal(command, size=(24, 40))
    assert terminal.finish() == 2
    lines = terminal.shown.replace("\r\n", "\n").splitlines()
    assert max(map(display_width, lines)) <= 40
    words = run(daemon, "list", "--state", "gone").stderr.split()
    assert " ".join(lines).split() == words


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ("queued", [17]),
        ("ended", [9, 10, 11, 13, 14]),
        ("failed", [9, 10]),
        ("time_limit", [10]),
        ("time-limit", [10]),
        ("time limit", [10]),
        ("lost", []),
    ],
)
def test_what_a_listing_shows_can_be_asked_for(daemon: StandIn, asked: str, ids: list[int]) -> None:
    listed = json.loads(run(daemon, "list", "--state", asked, "--json").stdout)
    assert [job["id"] for job in listed["jobs"]] == ids
    for row in run(daemon, "list", "--state", asked).stdout.splitlines()[1:]:
        assert int(row.split()[0]) in ids


def test_gpus_are_shown_by_index_and_by_uuid_where_none_is_known(daemon: StandIn) -> None:
    assert "GPU 0 (GPU-11111111)" in run(daemon, "show", "12").stdout
    daemon.status.gpus.clear()
    assert views.FIRST in run(daemon, "show", "12").stdout


def test_the_output_of_a_job_that_waits_is_said_to_be_to_come(daemon: StandIn) -> None:
    done = run(daemon, "logs", "17")
    assert (done.returncode, done.stdout) == (0, "")
    assert mentions(done.stderr, "job 17", "1st", "no 2 GPUs have 20G free")


def test_the_output_of_a_job_that_never_started_is_said_to_be_none(daemon: StandIn) -> None:
    gave_up = "waited 30m, as it was told to"
    daemon.jobs[20] = views.over(20, None, outcome="gave_up", started_at=None, reason=gave_up)
    done = run(daemon, "logs", "20")
    assert (done.returncode, done.stdout) == (0, "")
    assert mentions(done.stderr, "gpulease: job 20 ", gave_up)
    assert done.stderr.count("\n") == 1


def test_each_job_that_is_cancelled_is_answered_for(daemon: StandIn) -> None:
    daemon.jobs[12] = replace(daemon.jobs[12], state="releasing", grace=90.0)
    daemon.jobs[21] = views.running(21, state="releasing", kind="hold")
    daemon.jobs[22] = views.over(22, None, outcome="released", kind="hold")
    done = run(daemon, "cancel", "12", "17", "21", "22", "99")
    said = done.stdout.splitlines()
    assert [re.findall("job ([0-9]+)", line) for line in said] == [["12"], ["17"], ["21"], ["22"]]
    assert "1m 30s" in said[0]
    assert "99" in done.stderr
    assert done.returncode == 125
