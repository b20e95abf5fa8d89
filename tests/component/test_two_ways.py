"""A command line says and does the same, whether the quick parser reads it or typer."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.terminal import REPOSITORY, gpulease, ran, started
from gpulease.errors import BadValue
from gpulease.wire.frames import FrameKind, frame


@pytest.fixture
def daemon(daemon: StandIn) -> StandIn:
    daemon.status = views.busy_status()
    for job in (views.running(12, name="訓練"), views.waiting(), views.over(9, 1)):
        daemon.jobs[job.id] = job
    return daemon


def run(daemon: StandIn, way: str, *line: str, **more: str) -> tuple[int, str, str]:
    done = ran(daemon.path, *line, GPULEASE_QUICK_PARSER=way, **more)
    return done.returncode, done.stdout, done.stderr


LINES = [
    "status", "status --json", "status --queue x", "list", "list --all", "list --all --json",
    "list --limit 0", "list --state failed --limit 1",
    "list --user nobody-here", "list --limit -3",
    "status --queue -1", "help", "help run", "help statsu", "show 12", "show 17 9",
    "show 12 --json", "show 99", "show", "show 12 --all", "cancel 12", "cancel 99 12",
    "cancel 12 --user bob", "cancel 12 --grace never", "run -d --mem 4X true",
    "run -d --mem 1G true", "run", "run no-such-command", "run -d --array 0-3 --no-wait true",
    "cancel --name \udcff",
    "show 12,17", "show 1-99 --json", "show 90-99", "show -an x", "cancel 3-9", "cancel -n x",
    "list -an x", "list -u alice -n 訓*", "history -u alice -n x", "run -d --time 4 true",
    "run -d --time 1:30 true", "status --watch 4", "run -d --mem 4096 true",
    "run python3 nofile.py", "run -d --array 10 true", "cancel 9 --grace 4",
    "run -d --array 0-3 true --seed", "attach ''", "attach --watch 99", "logs --tail=5 99",
    "logs -n -1 12", "wait --timeout", "wait --any 99 17 --timeout 1s", "extend 12",
    "extend 99 -30m", "extend", "keep 12 --for never", "keep 99", "edit", "edit 17", "move 17",
    "edit 17 --time x", "edit 99 --mem 6G --begin never", "move 17 --before 12 --first",
    "requeue 99", "drain", "resume", "report --csv --json", "report --shares --csv",
    "reserve --for 1h --json", "hold --mem 4X", "pause x", "completion zsh", "completion tcsh",
    "",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_output_messages_and_exit_code_are_the_same(daemon: StandIn, line: str) -> None:
    screen = {"COLUMNS": "60", "FORCE_COLOR": "1"}
    quick, full = (run(daemon, way, *shlex.split(line), **screen) for way in ("on", "off"))
    assert quick == full


def test_refusals_of_the_daemon_are_the_same(daemon: StandIn) -> None:
    daemon.refusal = BadValue("cannot do this: because", "do that")
    for line in ("status", "list", "show 12", "cancel 12", "run -d true"):
        assert run(daemon, "on", *line.split()) == run(daemon, "off", *line.split())


def test_an_error_names_the_default_that_it_is_about(daemon: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "gpulease" / "config.toml"
    file.parent.mkdir()
    file.write_text('[run]\nmem = "4X"\ngrowth = true\n')
    line, home = ("run", "-d", "true"), {"XDG_CONFIG_HOME": str(tmp_path)}
    quick, full = (run(daemon, way, *line, **home) for way in ("on", "off"))
    assert quick == full
    assert f"comes from [run] in {file}" in quick[2]


@pytest.mark.parametrize(
    ("way", "to", "line"),
    [
        ("on", "&-", "status"), ("on", "/dev/full", "list"), ("off", "&-", "list"),
        ("on", "/dev/full", "logs 12"), ("on", "&-", "run -d --mem 4G true"),
        ("on", "&-", "--version"), ("off", "/dev/full", "help"),
    ],
)  # fmt: skip
def test_lost_output_is_a_failure(daemon: StandIn, way: str, line: str, to: str) -> None:
    daemon.logs = frame(FrameKind.STDOUT, b"out")
    program = [*gpulease(daemon.path)[:3], *line.split()]
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "GPULEASE_QUICK_PARSER": way,
        "GPULEASE_SOCKET": str(daemon.path),
    }  # fmt: skip
    ran = subprocess.run(
        ["sh", "-c", f'"$@" >{to}', "sh", *program], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    why = "Bad file descriptor" if to == "&-" else "No space left on device"
    assert (ran.returncode, ran.stderr) == (1, f"cannot write the output: {why}\n")


def test_a_closed_pipe_ends_a_command_as_sigpipe_would(daemon: StandIn) -> None:
    read, write = os.pipe()
    os.close(read)
    with started(daemon.path, "status", stdout=write) as process:
        os.close(write)
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


def test_a_closed_standard_error_is_no_failure_and_no_message_goes_elsewhere(
    daemon: StandIn,
) -> None:
    for line, status in (("status", 0), ("list --limit 0", 2)):
        program = gpulease(daemon.path, *line.split())
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        ran = subprocess.run(
            ["sh", "-c", '"$@" 2>&-', "sh", *program], env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == status
        assert bool(ran.stdout) == (status == 0)
