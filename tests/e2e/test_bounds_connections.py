"""Connections, streams and bodies of one user, over the real socket, from a daemon of root's."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

from daemon_rig import Daemon, wait_for
from e2e.users import (
    OTHER,
    STRANGER,
    as_user,
    call,
    daemon_for_all,
    job,
    needs_root,
    told,
)

pytestmark = needs_root

MOST_STREAMS = 5


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_for_all(most_streams=str(MOST_STREAMS)) as made:
        for _ in range(2):
            made.wait_until(made.submit("--mem", "8G", "--", "sleep", "3000"), "active")
        yield made


def test_a_thousand_connections_of_one_user_leave_others_served(daemon: Daemon) -> None:
    program = """
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = [raw() for _ in range(1010)]
answered = select.poll()
for each in held:
    answered.register(each, select.POLLIN)
ready = {fd for fd, _ in answered.poll(60_000)}
tell([each.recv(4096).decode() for each in held if each.fileno() in ready])
held.pop(0).close()
while True:
    try:
        if call("GET", "/v1/status")[0] == 200:
            break
    except ConnectionError:
        pass  # refused before it was sent
tell("served again")
sys.stdin.read()
"""
    with as_user(daemon, STRANGER, program) as process:
        answer = told(process)[0]
        assert answer.startswith("HTTP/1.1 429 "), answer
        assert "too_many" in answer
        assert told(process) == "served again"
        assert call(daemon, OTHER, "GET", "/v1/status")[0] == 200


def test_past_the_bound_of_streams_ones_own_status_and_cancel_still_come_through(
    daemon: Daemon,
) -> None:
    number = call(daemon, STRANGER, "POST", "/v1/jobs", job())[1]["id"]
    target = f"/v1/jobs/{number}/watch"
    program = f"""
held = []
for _ in range({MOST_STREAMS}):
    made = Unix("localhost", timeout=120)
    made.request("GET", {target!r})
    assert made.getresponse().status == 200
    held.append(made)
tell(call("GET", {target!r}))
tell(call("GET", "/v1/jobs/{number}/logs?follow=true"))
tell(call("GET", "/v1/status"))
held.pop().close()
tell(call("POST", "/v1/jobs/{number}/cancel"))
sys.stdin.read()
"""
    with as_user(daemon, STRANGER, program) as process:
        for _ in range(2):
            status, content = told(process)
            assert (status, content["error"]["code"]) == (429, "too_many")
            assert "gpulease list" in content["error"]["hint"]
        assert told(process)[0] == 200
        status, cancelled = told(process)
        assert (status, cancelled["outcome"]) == (200, "cancelled")


# The command as another user; what it needs is imported before, from where only root may read.
_RUN = """
import importlib, pkgutil
import gpulease.cli, typer
for package in (gpulease.cli, typer):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "_winconsole")):
            importlib.import_module(module.name)
"""


def test_a_run_past_the_bound_of_streams_says_so_and_stays_with_its_job(daemon: Daemon) -> None:
    number = call(daemon, STRANGER, "POST", "/v1/jobs", job())[1]["id"]
    streams = f"""
held = []
for _ in range({MOST_STREAMS}):
    made = Unix("localhost", timeout=120)
    made.request("GET", "/v1/jobs/{number}/watch")
    assert made.getresponse().status == 200
    held.append(made)
tell("full")
sys.stdin.read()
"""
    program = """
from gpulease.cli.app import main
sys.argv = ["gpulease", "--socket", path, "run", "--mem", "8G", "--", "true"]
main()
"""
    with as_user(daemon, STRANGER, streams) as holding:
        assert told(holding) == "full"
        with run_command(daemon, program) as command:
            assert command.stderr is not None
            lines = [command.stderr.readline() for _ in range(1)]
            while len([line for line in lines if "job " in line]) < 2:
                assert lines[-1], lines
                lines.append(command.stderr.readline())
            waiting = [each for each in daemon.status()["jobs"] if each["user"] == str(STRANGER)]
            assert len(waiting) == 2, "its job is in the queue"
            for each in waiting:
                call(daemon, STRANGER, "POST", f"/v1/jobs/{each['id']}/cancel")
            # It looks again in its own time, and leaves as for any job that was cancelled.
            assert command.wait(120) == 128 + 15


def run_command(daemon: Daemon, program: str) -> subprocess.Popen[str]:
    import sys

    from e2e.users import _CALLS

    return subprocess.Popen(
        [sys.executable, "-c", _RUN + _CALLS + program, str(STRANGER), str(daemon.socket)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, cwd="/",
    )  # fmt: skip


def test_a_body_that_never_ends_is_given_up_and_holds_up_nobody(daemon: Daemon) -> None:
    program = """
head = b"POST /v1/jobs HTTP/1.1\\r\\nHost: g\\r\\nContent-Length: 6000000\\r\\n\\r\\n"
slow = [raw() for _ in range(40)]
for each in slow:
    each.sendall(head + b"x" * 70000)
tell(call("GET", "/v1/status")[0])
answer = b""
while piece := slow[0].recv(4096):
    answer += piece
tell(answer.decode())
sys.stdin.read()
"""
    with as_user(daemon, STRANGER, program) as process:
        assert told(process) == 200, "one's own other requests are answered meanwhile"
        assert call(daemon, OTHER, "GET", "/v1/status")[0] == 200
        answer = told(process)
        assert answer.startswith("HTTP/1.1 408 "), answer
        assert "too_slow" in answer


def test_a_daemon_that_was_flooded_has_let_go_of_everything(daemon: Daemon) -> None:
    assert daemon.process is not None
    program = "[raw() for _ in range(500)]; tell('there')"
    with as_user(daemon, STRANGER, program) as process:
        assert told(process) == "there"
    pid = daemon.process.pid

    def sockets() -> int:
        from pathlib import Path

        count = 0
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                count += each.readlink().name.startswith("socket:")
        return count

    wait_for("their connections are closed", lambda: sockets() < 50)
