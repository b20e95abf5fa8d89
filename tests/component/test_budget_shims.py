"""What a job that does nothing costs its shim: system calls, forks, flushes, imports."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpulease.host.launcher import _request
from gpulease.shim.record import is_alive
from process_rig import launch_of, read_record, wait_until

SHIM_CALLS = 86 if sys.version_info < (3, 12) else 90
"""From 3.12, Python takes four to count its threads at a fork."""
WORKER_CALLS = 26
"""Up to its command. 11 of them reset signals."""
FLUSHES = {"fsync": 1, "fdatasync": 1}
"""The directory with the record's name, before the command; the end in the record, after it."""
ROOT = str(Path(sys.modules["gpulease"].__file__ or "").parents[1])
SPAWNER = [sys.executable, "-P", "-S", "-X", "utf8"]
ENVIRONMENT = {"PYTHONPATH": ROOT, "LD_BIND_NOW": "1"}


def run_spawner(command: list[str], directory: Path) -> None:
    """Start a spawner by a command that lacks the channel, and launch a job that does nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        spawner = subprocess.Popen(
            [*command, str(theirs.fileno())],
            cwd="/", env=ENVIRONMENT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        _launch(ours, directory)
        ours.close()
        assert spawner.wait(60) == 0


def _launch(channel: socket.socket, directory: Path) -> None:
    request = os.memfd_create("request")
    os.write(request, _request(launch_of(directory, "/bin/true")))
    reply, status = os.pipe()
    socket.send_fds(channel, [b"L"], [request, status])
    os.close(status)
    os.close(request)
    with os.fdopen(reply, "rb") as lines:
        assert b"started" in lines.read()
    wait_until(lambda: not is_alive(directory), "the end of the shim")


def calls(log: str, pid: int) -> list[str]:
    """Return the names of the system calls of one process; one that is interrupted counts once."""
    return re.findall(rf"^{pid} +(\w+)\(", log, re.MULTILINE)


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here")
def test_a_launch_takes_few_system_calls_one_fork_and_two_flushes(
    directory: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    run_spawner(
        ["strace", "-f", "-qq", "-o", str(trace), *SPAWNER, "-m", "gpulease.shim.spawner"],
        directory,
    )
    record = read_record(directory)
    assert record is not None and record.started is not None
    log = trace.read_text()
    shim, worker = (calls(log, pid) for pid in (record.started.shim_pid, record.started.pid))
    begun = shim.index("recvmsg")
    assert len(shim) < SHIM_CALLS, Counter(shim)
    assert len({"clone", "clone3", "fork", "vfork"} & set(shim)) == 1, Counter(shim)
    assert sum(shim.count(name) for name in ("clone", "clone3", "fork", "vfork")) == 1
    assert {name: shim[begun:].count(name) for name in FLUSHES} == FLUSHES
    before = worker[: worker.index("execve")]
    assert len(before) < WORKER_CALLS, Counter(before)
    assert not set(before) & {"fsync", "fdatasync", "openat", "clone"}
