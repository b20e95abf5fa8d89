"""Every route against every kind of caller, over real sockets and real users."""

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import Daemon
from gpulease.server.handlers import Handlers
from gpulease.server.rights import Who
from gpulease.server.routes import table

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users takes root")

# Each user's call, from a process that has become them: the kernel vouches for who calls.
_CALL = """
import http.client, os, pwd, socket, sys, json
user, path, method, target, body = sys.argv[1:]
who = pwd.getpwnam(user)
os.initgroups(user, who.pw_gid); os.setgid(who.pw_gid); os.setuid(who.pw_uid)
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(path)
call = Unix("localhost", timeout=30)
call.request(method, target, body or None, {"content-type": "application/json"})
reply = call.getresponse()
print(json.dumps([reply.status, reply.read().decode("latin-1")]))
"""

# The command as another user. Everything is imported before, since the Python of a test run may
# stand where only root can read.
_COMMAND = """
import importlib, os, pkgutil, pwd, sys
import gpulease.cli
for module in pkgutil.walk_packages(gpulease.cli.__path__, "gpulease.cli."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
user = sys.argv.pop(1)
who = pwd.getpwnam(user)
os.initgroups(user, who.pw_gid); os.setgid(who.pw_gid); os.setuid(who.pw_uid)
from gpulease.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[str, str]]:
    """Make two users of this machine, and remove them afterwards."""
    names = tuple(f"gl{os.getpid() % 100000}{letter}" for letter in "ab")
    for name in names:
        subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True)
    yield names[0], names[1]
    for name in names:
        subprocess.run(["userdel", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("rights")
    for part in (folder, *folder.parents):
        if part.owner() == "root" and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o055)
    made = Daemon(folder, settings={"grace": "2s"})
    yield made.start()
    made.end_all()


def call(
    daemon: Daemon, user: str, method: str, target: str, body: object = None
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _CALL, user, str(daemon.socket), method, target,
         json.dumps(body) if body is not None else ""],
        capture_output=True, text=True, timeout=60, check=True, cwd="/",
    )  # fmt: skip
    status, content = json.loads(done.stdout)
    return status, content


def submit(daemon: Daemon, user: str, *argv: str) -> int:
    body = {
        "argv": list(argv),
        "cwd": "/",
        "environment": {"PATH": "/usr/bin:/bin", "SECRET": "xyzzy"},
        "claim": {"memory": 1 << 30},
    }
    status, content = call(daemon, user, "POST", "/v1/jobs", body)
    assert status == 201, content
    return int(json.loads(content)["id"])


@needs_root
def test_each_route_is_open_to_whom_the_table_says_and_to_no_one_else(
    daemon: Daemon, users: tuple[str, str]
) -> None:
    alice, bob = users
    jobs = {user: submit(daemon, alice, "sleep", "600") for user in (alice, bob, "root")}
    rows = []
    for route in table(Handlers(None)):  # type: ignore[arg-type]
        if route.path in ("/jobs", "/jobs/{job_id}/watch"):
            continue
        for user, job in jobs.items():
            target = "/v1" + route.path.format(job_id=job)
            status, _ = call(daemon, user, route.method, target)
            may = route.who is Who.ANYONE or user != bob
            rows.append(f"{route.method:5} {route.path:25} {user:12} {status}")
            assert status == (200 if may else 403), rows[-1]
    sys.stdout.write("\n".join(rows))
    call(daemon, "root", "POST", f"/v1/jobs/{jobs[bob]}/cancel")


@needs_root
def test_a_job_runs_as_the_user_who_asked_with_their_groups_and_nothing_of_root(
    daemon: Daemon, users: tuple[str, str]
) -> None:
    alice, _ = users
    who = pwd.getpwnam(alice)
    job = submit(
        daemon, alice, "sh", "-c",
        "id; ls -l /proc/self/fd | wc -l; grep -E 'Cap(Eff|Prm|Amb|Inh)' /proc/self/status;"
        " env | cut -d= -f1 | sort | tr '\\n' ' '",
    )  # fmt: skip
    daemon.wait_until(job, "ended")
    out = daemon.run("logs", str(job)).stdout
    assert f"uid={who.pw_uid}({alice}) gid={who.pw_gid}({alice}) groups={who.pw_gid}" in out
    assert out.count("0000000000000000") == 4, out
    assert "SECRET" in out
    assert not {"INVOCATION_ID", "NOTIFY_SOCKET", "GPULEASE_SOCKET"} & set(out.split())


@needs_root
def test_nobody_but_the_owner_reads_output_or_finds_the_environment_anywhere(
    daemon: Daemon, users: tuple[str, str]
) -> None:
    alice, bob = users
    job = submit(daemon, alice, "echo", "private")
    daemon.wait_until(job, "ended")
    status, content = call(daemon, bob, "GET", f"/v1/jobs/{job}")
    assert status == 200
    assert "xyzzy" not in content
    assert json.loads(content)["directory"] is None
    assert call(daemon, bob, "GET", f"/v1/jobs/{job}/logs")[0] == 403
    assert "private" in call(daemon, alice, "GET", f"/v1/jobs/{job}/logs")[1]
    files = [path for path in daemon.state.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert not path.stat().st_mode & 0o077, path


@needs_root
def test_a_user_attaches_to_their_own_job_through_a_state_directory_they_cannot_list(
    daemon: Daemon, users: tuple[str, str]
) -> None:
    alice, _ = users
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, alice, "--socket", str(daemon.socket),
         "run", "--mem", "1G", "--", "id", "-un"],
        capture_output=True, text=True, timeout=60, check=False, cwd="/",
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (f"{alice}\n", 0), done


@needs_root
def test_a_personal_daemon_refuses_to_work_for_anyone_else(
    daemon: Daemon, users: tuple[str, str]
) -> None:
    from gpulease.errors import NotAllowed
    from gpulease.server.peer import Caller
    from gpulease.server.rights import check_submit

    del daemon, users
    check_submit(Caller(1, 1000, 1000), daemon_uid=0)
    check_submit(Caller(1, 1000, 1000), daemon_uid=1000)
    for stranger in (0, 1001):
        with pytest.raises(NotAllowed):
            check_submit(Caller(1, stranger, 1000), daemon_uid=1000)
