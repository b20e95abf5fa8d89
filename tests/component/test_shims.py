"""A shim is known from its record's first line on, whatever its user does to its socket."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease.host.shim_control import living_shim
from gpulease.shim.record import forbid

# All of a shim that there is until its worker runs: its record, and a socket that nobody serves.
_SHIM = """
import os, socket, sys
from gpulease.shim.record import claim
directory = os.open(sys.argv[1], os.O_RDONLY)
record = claim(directory, os.getpid())
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1] + "/socket")
listener.listen(1)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_shim_that_is_stopped_behind_a_full_socket_is_found(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SHIM, str(tmp_path)]
    callers = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shim:
        assert shim.stdout is not None
        assert shim.stdout.readline() == b"up\n"
        os.kill(shim.pid, signal.SIGSTOP)
        try:
            while True:
                caller = socket.socket(socket.AF_UNIX)
                callers.append(caller)
                caller.setblocking(False)
                caller.connect(str(tmp_path / "socket"))
        except BlockingIOError:
            found = living_shim(tmp_path)
        finally:
            shim.kill()
            for each in callers:
                each.close()
    assert found is not None
    assert found.pid == shim.pid
    assert living_shim(tmp_path) is None, "it is gone"


def test_a_launch_that_is_forbidden_has_no_shim(tmp_path: Path) -> None:
    assert forbid(tmp_path)
    assert living_shim(tmp_path) is None


@pytest.fixture(autouse=True)
def _in_reach(tmp_path: Path) -> None:
    if len(bytes(tmp_path)) > 90:
        pytest.skip("the path of a socket is 107 bytes at most")
