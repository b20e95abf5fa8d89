"""What an everyday command costs: its time beside that of Python itself, and its imports."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from component.test_client_run import active
from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.shim import ShimStandIn
from daemon_stand_in.terminal import REPOSITORY

IN_THE_BACKGROUND = ["run", "-d", "--mem", "4G", "--time", "1h", "--", "true"]
IN_THE_FOREGROUND = ["run", "--mem", "4G", "--time", "1h", "--", "true"]
EVERYDAY = [
    ["status"], ["list", "--all", "--user", "alice"], ["show", "12", "--json"], ["cancel", "12"],
    ["history", "--since", "7d", "--state", "failed"], IN_THE_BACKGROUND,
    ["completion", "bash"], ["keep", "12", "--for", "2h"], ["requeue", "12"],
    ["extend", "12", "+1h"],
]  # fmt: skip
MOST_IMPORTS = 100
"""Of any package, beside what Python imports at its start."""
SLOW = {"asyncio", "dataclasses", "inspect", "msgspec", "pydantic", "rich", "sqlalchemy", "typer"}
"""Each takes a third of Python's own start or more, with what it imports."""
STARTS = 3.0
"""Of Python, in CPU time, for a command that asks the daemon once. The goal is 2.5: `make bench`
measures it, and the rest is for a busy machine."""

# The command leaves by os._exit, which no atexit function sees.
_REPORT = """
import os, sys
before, leave = set(sys.modules), os._exit
def report(exit_code):
    os.write(2, " ".join({*sys.modules} - before).encode())
    leave(exit_code)
os._exit = report
"""
_MAIN = "from gpulease.cli.app import main; main()"


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    made = StandIn(tmp_path_factory.mktemp("budget") / "s")
    made.status = views.busy_status()
    for job in (views.running(12), views.waiting(), views.over(9, 1)):
        made.jobs[job.id] = job
    made.open()
    yield made
    made.close()


def gpulease(program: str, socket: Path, *line: str) -> str:
    """Run a command in a Python of its own, and return what it wrote to stderr."""
    ran = subprocess.run(
        [sys.executable, "-c", program, "--socket", str(socket), *line], cwd="/",
        env={"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}, capture_output=True,
        stdin=subprocess.DEVNULL, text=True, check=True, timeout=60,
    )  # fmt: skip
    return ran.stderr


def imports(socket: Path, *line: str) -> set[str]:
    return set(gpulease(_REPORT + _MAIN, socket, *line).split())


@pytest.mark.parametrize("line", EVERYDAY, ids=" ".join)
def test_an_everyday_command_imports_few_modules_and_no_slow_one(
    standing: StandIn, line: list[str]
) -> None:
    found = imports(standing.path, *line)
    assert len(found) <= MOST_IMPORTS, sorted(found)
    assert not SLOW & found


@pytest.mark.parametrize(
    "line",
    [["__complete", "sta"], ["__complete", "run", "--me"], ["__complete", "show", ""],
     ["__complete", "drain", ""], ["--help"], ["run", "--help"], ["help", "edit"]],
    ids=" ".join,
)  # fmt: skip
def test_a_tab_and_help_import_few_modules_and_no_slow_one(
    standing: StandIn, line: list[str]
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _REPORT + _MAIN, *line], cwd="/",
        env={"PYTHONPATH": str(REPOSITORY), "GPULEASE_SOCKET": str(standing.path)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert ran.stdout.startswith(("words\n", "Usage: gpulease "))
    found = set(ran.stderr.split())
    assert len(found) <= MOST_IMPORTS, sorted(found)
    assert not SLOW & found


def test_a_run_in_the_foreground_imports_few_modules_and_asks_once(
    daemon: StandIn, shim: ShimStandIn
) -> None:
    daemon.on_submit = active(shim)
    shim.exit_soon()
    found = imports(daemon.path, *IN_THE_FOREGROUND)
    assert len(found) <= MOST_IMPORTS, sorted(found)
    assert not SLOW & found
    # The shim of this test accepts one connection.
    assert daemon.asked == ["POST /v1/jobs?follow=true"]
    assert shim.hello == {"role": "attach"}


def test_a_run_of_a_job_that_ends_at_once_imports_few_modules(daemon: StandIn) -> None:
    daemon.on_submit = views.over(1, 0)
    found = imports(daemon.path, *IN_THE_FOREGROUND)
    assert len(found) <= MOST_IMPORTS, sorted(found)
    assert not SLOW & found


def cpu_s(program: str, socket: Path, *line: str) -> float:
    """Return the CPU time of a Python that ran a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    gpulease(program, socket, *line)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("line", [["status"], ["list"], IN_THE_BACKGROUND], ids=lambda it: it[0])
def test_an_everyday_command_takes_little_more_time_than_python(
    standing: StandIn, line: list[str]
) -> None:
    # Other load slows both of a pair; the least of each may be of different moments.
    starts = [cpu_s(_MAIN, standing.path, *line) / cpu_s("pass", standing.path) for _ in range(9)]
    assert median(starts) <= STARTS, starts
