"""`gpulease run` and `attach` on a real terminal, and leases in Python."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from daemon_stand_in.terminal import Terminal

Open = Callable[..., Terminal]
ECHO = "import sys\nprint('first', flush=True)\nfor line in sys.stdin: print('got', line)"


@pytest.fixture
def sit(daemon: Daemon, tmp_path: Path) -> Iterator[Open]:
    """Return what opens a terminal with a command of gpulease on it."""
    opened: list[Terminal] = []

    def sit_down(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal(daemon.gpulease(*arguments), HOME=str(tmp_path), **options))
        return opened[-1]

    yield sit_down
    for terminal in opened:
        if terminal.status is None:
            os.kill(terminal.pid, signal.SIGKILL)
            terminal.hang_up()


def test_detach_and_attach_again(sit: Open, daemon: Daemon) -> None:
    terminal = sit("run", "--mem", "1G", "--", sys.executable, "-c", ECHO)
    terminal.read_until("first")
    terminal.type(b"\x1cd")
    assert terminal.finish() == 0
    assert terminal.after == terminal.found
    (job,) = daemon.status()["jobs"]
    assert f"gpulease attach {job['id']}" in terminal.shown

    again = sit("attach", str(job["id"]), size=(40, 90))
    again.read_until("first")
    again.type(b"hello\r")
    again.read_until("got hello")
    again.type(b"\x04")
    assert again.finish() == 0
    assert again.after == again.found


def test_a_shell_has_a_lease_until_it_is_left(sit: Open, daemon: Daemon) -> None:
    terminal = sit("run", "--mem", "1G", "--shell", SHELL="/bin/sh")
    terminal.read_until("gpulease: ")
    terminal.type(b"echo $((6*7)) $GPULEASE_MEMORY; exit 3\r")
    assert terminal.finish() == 3
    assert f"42 {1 << 30}" in terminal.shown


def test_a_terminal_that_is_closed_leaves_the_job_running(sit: Open, daemon: Daemon) -> None:
    terminal = sit("run", "--mem", "1G", "--", sys.executable, "-c", ECHO)
    terminal.read_until("first")
    assert terminal.hang_up() in (129, -signal.SIGHUP)
    (job,) = daemon.status()["jobs"]
    assert job["state"] == "active"


def test_ctrl_c_ends_a_command_that_waits_and_its_job(sit: Open, daemon: Daemon) -> None:
    holder = daemon.submit("--exclusive", "--gpus", "2", "--", "sleep", "600")
    daemon.wait_until(holder, "active")
    terminal = sit("run", "--mem", "1G", "--", "true")
    waiting = wait_for(
        "it waits", lambda: [job for job in daemon.status()["jobs"] if job["state"] == "queued"]
    )
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert daemon.wait_until(waiting[0]["id"], "ended")["outcome"] == "cancelled"


def python(daemon: Daemon, script: str) -> str:
    """Run a script in a Python that finds the daemon, and return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "GPULEASE_SOCKET": str(daemon.socket), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_lease_in_python_lasts_as_long_as_its_block(daemon: Daemon) -> None:
    script = (
        "import gpulease, os\n"
        "with gpulease.lease('3G', gpus=2) as lease:\n"
        "    print(lease.id, os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    print(sum(gpu.memory.leased for gpu in gpulease.Client().status().gpus) >> 30)\n"
        "print('GPULEASE_JOB' in os.environ)\n"
    )
    number, visible, leased, after = python(daemon, script).split()
    assert set(visible.split(",")) == {gpu["uuid"] for gpu in daemon.status()["gpus"]}
    assert (leased, after) == ("6", "False")
    assert daemon.wait_until(int(number), "ended")["outcome"] == "released"
