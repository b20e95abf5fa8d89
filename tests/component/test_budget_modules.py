"""What everyday commands import: a module more costs each of them, and this test names it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.terminal import REPOSITORY

ALWAYS = {
    "cli", "cli.app", "cli.cluster", "cli.everyday", "cli.format", "cli.light_connection",
    "cli.quick_options", "cli.quick_parser", "cli.render", "cli.tables", "client",
    "client.http", "client.known_sockets", "client.light_client", "client.transport",
    "client.unix_socket", "build", "cluster_choice", "errors", "light_json", "locations",
    "peer_credentials", "record", "units", "wire", "wire.text",
}  # fmt: skip
JOBS = {"cli.job_gpus", "cli.job_page", "cli.job_report", "cli.job_selection", "cli.script"}
OURS = {
    "status": ALWAYS
    | {"cli.gpu_rows", "cli.status_page", "cli.status_tables", "pwd", "wire.unmanaged"},
    "list": ALWAYS | {"cli.list_page", "cli.pager"},
    "show": ALWAYS | JOBS | {"cli.show_jobs"},
    "cancel": ALWAYS | {"cli.cancel_jobs", "cli.job_selection"},
    "history": ALWAYS | {"cli.history_page", "cli.pager"},
}
FROM_PYTHON = {
    "__future__", "_collections", "_datetime", "_json", "_socket", "_struct", "errno", "gc",
    "itertools",
    "struct",
}  # fmt: skip
"""All in C but two. No re, typing, dataclasses, enum, datetime, pathlib, socket, json."""

_PROGRAM = """
import os, sys
before, leave = set(sys.modules), os._exit
def report(exit_code):
    print(*sorted(set(sys.modules) - before), file=sys.stderr)
    leave(exit_code)
os._exit = report
from gpulease.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    made = StandIn(tmp_path_factory.mktemp("budget") / "s")
    made.status = views.busy_status()
    for job in (views.running(12), views.waiting(), views.over(9, 1)):
        made.jobs[job.id] = job
    made.open()
    yield made
    made.close()


def imported(daemon: StandIn, *line: str) -> set[str]:
    """Return the modules that a command imports, with those of gpulease without its name."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--socket", str(daemon.path), *line],
        env={"PYTHONPATH": str(REPOSITORY)}, cwd=Path("/"), capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    return {name.removeprefix("gpulease.") for name in ran.stderr.split()} - {"gpulease"}


@pytest.mark.parametrize(
    "line",
    ["status", "status --json", "list", "list --all --user alice", "list --json", "show 12",
     "show 17 9", "show 12 --json", "cancel 12",
     "history", "history --since 7d --state failed"],
)  # fmt: skip
def test_an_everyday_command_imports_these_modules_and_no_other(daemon: StandIn, line: str) -> None:
    verb, *_ = line.split()
    assert imported(daemon, *line.split()) <= OURS[verb] | FROM_PYTHON


def test_a_job_for_slurm_starts_without_slow_modules() -> None:
    program = "import sys, gpulease.cli.cluster.run; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    slow = {"asyncio", "dataclasses", "hashlib", "inspect", "msgspec", "shutil", "typer"}
    assert not {*slow, "gpulease.config"} & set(ran.stdout.split())


def test_the_version_imports_next_to_nothing(daemon: StandIn) -> None:
    program = _PROGRAM.replace("main()", "sys.argv = ['gpulease', '--version']; main()")
    ran = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    names = {"gpulease", "gpulease.build", "gpulease.cli", "gpulease.cli.app"}
    assert set(ran.stderr.split()) <= names | {"__future__", "errno"}
