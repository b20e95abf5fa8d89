"""`gpulease run` inside a job: it runs within the job's lease, and takes no second one unasked."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import PATIENCE_S, Daemon
from daemon_stand_in.terminal import Terminal
from goldens import mentions

G = 1024**3
GPULEASE = shlex.join([sys.executable, "-m", "gpulease.cli"])
TELL = "sh -c 'echo $GPULEASE_JOB $GPULEASE_MEMORY'"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("d"), simulate="2x4G", settings={"grace": "2s"}).start()
    yield made
    made.end_all()


def jobs(daemon: Daemon) -> list[int]:
    listed = daemon.jobs()
    return [job["id"] for job in listed]


def inside(daemon: Daemon, script: str, *options: str, **more: Any) -> Any:
    """Run a shell script in a job with the whole of a GPU, or with `options`."""
    reached = os.environ | {"GPULEASE_SOCKET": str(daemon.socket)}
    wanted = options or ("--mem", "4G")
    return daemon.run("run", *wanted, "--", "sh", "-c", script, check=False, env=reached, **more)


def test_it_runs_within_the_lease_of_the_job_though_the_machine_is_full(daemon: Daemon) -> None:
    before = jobs(daemon)
    script = f"echo $GPULEASE_JOB; {GPULEASE} run --mem 4G {TELL}; {GPULEASE} run {TELL}"
    ran = inside(daemon, script, "--mem", "4G", "--gpus", "2")
    number, *told = ran.stdout.splitlines()
    assert told == [f"{number} {4 * G}"] * 2
    assert [f"job {number}" in line for line in ran.stderr.splitlines()] == [True, True]
    assert len(jobs(daemon)) == len(before) + 1


@pytest.mark.parametrize("cleared", ["", "env -u GPULEASE_JOB -u CUDA_VISIBLE_DEVICES "])
def test_a_dry_run_knows_the_lease_around_it(daemon: Daemon, cleared: str) -> None:
    ran = inside(daemon, f"{cleared}{GPULEASE} run --dry-run --mem 1G true")
    assert "within the lease of job" in ran.stdout


def test_it_is_held_to_what_it_asks_for(daemon: Daemon) -> None:
    show = "import os; print(os.environ['GPULEASE_MEMORY'], os.environ['CUDA_VISIBLE_DEVICES'])"
    line = f"{GPULEASE} run --mem 1G -- {sys.executable} -c {shlex.quote(show)}"
    second = "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES#*,}"
    script = f"echo $CUDA_VISIBLE_DEVICES; {line}; {second} {line}"
    ran = inside(daemon, script, "--mem", "2G", "--gpus", "2")
    both, first, chosen = ran.stdout.splitlines()
    assert first.split() == [str(G), both.split(",")[0]]
    assert chosen.split() == [str(G), both.split(",")[1]]


def test_its_streams_and_its_exit_code_are_those_of_the_command(daemon: Daemon) -> None:
    command = "sh -c 'cat; echo err >&2; exit 7'"
    ran = inside(daemon, f"printf in | {GPULEASE} run --mem 1G {command}; echo $?")
    assert ran.stdout == "in7\n"
    assert ran.stderr.endswith("\nerr\n")
    killed = f"{GPULEASE} run --mem 1G sh -c 'kill -TERM $$'; echo $?"
    assert inside(daemon, killed).stdout == f"{128 + signal.SIGTERM}\n"
    piped = f"{GPULEASE} run --mem 1G yes | head -n 1"
    assert inside(daemon, piped).stdout == "y\n"


@pytest.mark.parametrize(
    ("options", "why", "hint"),
    [
        ("--mem 5G", "5G", "4G"),
        ("--gpus 2", "1 GPU", "1 GPU"),
        ("--exclusive", "exclusive", "--exclusive"),
        ("--time 1h", "time limit", "timeout 4h COMMAND"),
        ("-d", "-d", "gpulease run COMMAND &"),
        ("--retry-oom 2x", "--retry-oom", "job"),
        ("--retries 2", "--retries", "job"),
    ],
)
def test_what_takes_a_job_of_its_own_is_refused_in_words(
    daemon: Daemon, options: str, why: str, hint: str
) -> None:
    ran = inside(daemon, f"{GPULEASE} run {options} -- echo ran; echo $?")
    assert ran.stdout == "125\n"
    message, _, told = ran.stderr.partition("\n\nhint: ")
    assert why in message and "job" in message
    assert hint in told and "--new-lease" in told


def test_options_without_effect_are_named(daemon: Daemon) -> None:
    ran = inside(daemon, f"{GPULEASE} run --mem 1G --no-wait --name x --grace 1s echo ran")
    assert ran.stdout == "ran\n"
    assert mentions(ran.stderr, "1 GPU", "--name", "--grace")
    assert "--no-wait" not in ran.stderr


def test_a_second_lease_is_for_who_asks_for_it(daemon: Daemon) -> None:
    script = f"echo $GPULEASE_JOB; {GPULEASE} run --new-lease --mem 1G {TELL}"
    outer, inner = inside(daemon, script, "--mem", "1G").stdout.splitlines()
    assert inner == f"{int(outer) + 1} {G}"


def test_a_part_within_a_part_is_no_larger_than_that(daemon: Daemon) -> None:
    ran = inside(daemon, f"{GPULEASE} run --mem 1G -- {GPULEASE} run --mem 2G -- echo ran")
    assert ran.stdout == ""
    assert mentions(ran.stderr, "1G", "2G")


@pytest.mark.parametrize("cleared", ["env -i PATH=$PATH", "env -u GPULEASE_JOB"])
def test_a_cleared_environment_does_not_hide_the_job(daemon: Daemon, cleared: str) -> None:
    script = f"echo $GPULEASE_JOB; {cleared} GPULEASE_SOCKET=$GPULEASE_SOCKET {GPULEASE} run "
    number, told = inside(daemon, script + f"--mem 2G {TELL}").stdout.splitlines()
    assert told == f"{number} {2 * G}"


def test_a_variable_that_outlives_its_job_does_not_mislead(daemon: Daemon) -> None:
    ended = daemon.submit("--mem", "1G", "true")
    daemon.wait_until(ended, "ended")
    other = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(other, "active")
    for number in (ended, other):
        environment = os.environ | {"GPULEASE_JOB": str(number), "GPULEASE_MEMORY": "1"}
        ran = daemon.run("run", "--mem", "1G", *shlex.split(TELL), env=environment)
        new, memory = ran.stdout.split()
        assert (int(new) > other, int(memory)) == (True, G)
        assert "within" not in ran.stderr
    daemon.cancel(other)


def test_a_shell_within_a_job_is_this_terminals_own(daemon: Daemon, tmp_path: Path) -> None:
    # The job on a terminal is a shell; what is typed goes to the shell within it.
    terminal = Terminal(
        daemon.gpulease("run", "--mem", "2G", "--", "sh", "-c", f"{GPULEASE} run --mem 1G --shell"),
        SHELL="/bin/sh", HOME=str(tmp_path), GPULEASE_SOCKET=str(daemon.socket),
    )  # fmt: skip
    terminal.read_until("gpulease: ")
    terminal.type(b"echo $((6*7)) $GPULEASE_MEMORY; tty -s && exit 5\r")
    assert terminal.finish() == 5
    assert f"42 {G}" in terminal.shown


def test_a_process_that_left_the_job_and_outlived_it_gets_a_lease_of_its_own(
    daemon: Daemon, tmp_path: Path
) -> None:
    # A shell with the variables of a job that has ended, as a terminal of tmux may be one.
    dump = tmp_path / "environment"
    inside(daemon, f"env -0 > {dump}")
    names = (line.partition("=") for line in dump.read_text().split("\0") if line)
    environment = {name: value for name, _, value in names}
    ran = subprocess.run(
        ["sh", "-c", f"echo $GPULEASE_JOB; {GPULEASE} run --mem 1G {TELL}"],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    old, new = ran.stdout.splitlines()
    assert int(new.split()[0]) > int(old)
