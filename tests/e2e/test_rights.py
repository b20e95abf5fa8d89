"""What users may do to each other's jobs and read of them, over real sockets as real users.

Who may use which route is in tests/unit/test_routes.py.
"""

import contextlib
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator

import pytest

from daemon_rig import Daemon
from e2e.users import daemon_for_all, needs_root

# Each user's call, from a process that has become them: the kernel vouches for who calls.
_CALL = """
import http.client, os, pwd, socket, sys, json
user, path, method, target, body = sys.argv[1:]
who = pwd.getpwnam(user)
os.initgroups(user, who.pw_gid); os.setgid(who.pw_gid); os.setuid(who.pw_uid)
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(path)
call = Unix("localhost", timeout=120)
call.request(method, target, body or None, {"content-type": "application/json"})
reply = call.getresponse()
print(json.dumps([reply.status, reply.read().decode("latin-1")]), flush=True)
sys.stdin.read()  # it lives until it is let go
"""

# The command as another user. Everything is imported before, since the Python of a test run may
# stand where only root can read.
_COMMAND = """
import importlib, os, pkgutil, pwd, sys
import gpulease.cli, typer
for package in (gpulease.cli, typer):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "_winconsole")):
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
def admin(users: tuple[str, str]) -> Iterator[str]:
    """Make a user whose second group is that of the admins."""
    name, group = users[0][:-1] + "c", admins_of(users)
    subprocess.run(["groupadd", group], check=True)
    make = ["useradd", "--no-create-home", "--shell", "/bin/sh", "--groups", group, name]
    subprocess.run(make, check=True)
    yield name
    subprocess.run(["userdel", name], check=False, capture_output=True)
    subprocess.run(["groupdel", group], check=False, capture_output=True)


def admins_of(users: tuple[str, str]) -> str:
    return users[0][:-1] + "adm"


@pytest.fixture(scope="module")
def daemon(users: tuple[str, str]) -> Iterator[Daemon]:
    with daemon_for_all(admins=admins_of(users)) as made:
        yield made


def call(
    daemon: Daemon, user: str, method: str, target: str, body: object = None
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _CALL, user, str(daemon.socket), method, target,
         json.dumps(body) if body is not None else ""],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, content = json.loads(done.stdout)
    return status, content


def submit(daemon: Daemon, user: str, *argv: str, held: bool = False) -> int:
    body = {
        "argv": list(argv),
        "cwd": "/",
        "environment": {"PATH": "/usr/bin:/bin", "SECRET": "xyzzy"},
        "claim": {"memory": 1 << 30, "time_limit": 3600},
        "queue": {"held": held},
    }
    status, content = call(daemon, user, "POST", "/v1/jobs", body)
    assert status == 201, content
    return int(json.loads(content)["id"])


@contextlib.contextmanager
def process_on_gpu(daemon: Daemon, user: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a user that uses a simulated GPU without a lease."""
    who, gpu = pwd.getpwnam(user), daemon.status()["gpus"][0]["uuid"]
    process = subprocess.Popen(
        ["sleep", "1000"], user=who.pw_uid, group=who.pw_gid, extra_groups=[], cwd="/",
        env={"CUDA_VISIBLE_DEVICES": gpu},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@needs_root
def test_an_admin_acts_on_a_job_and_does_not_read_what_may_be_secret(
    daemon: Daemon, users: tuple[str, str], admin: str
) -> None:
    job = submit(daemon, users[0], "sleep", "600")
    daemon.wait_until(job, "active")
    shown = json.loads(call(daemon, admin, "GET", f"/v1/jobs/{job}")[1])
    assert shown["directory"] is None
    assert call(daemon, admin, "GET", f"/v1/jobs/{job}/logs")[0] == 403
    assert call(daemon, admin, "POST", f"/v1/jobs/{job}/cancel")[0] == 200
    ended = daemon.wait_until(job, "ended")
    assert ended["outcome"] == "cancelled"
    assert any(admin in (event["detail"] or "") for event in ended["events"]), "who it was"


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
        capture_output=True, text=True, timeout=120, check=False, cwd="/",
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (f"{alice}\n", 0), done


@pytest.fixture
def process_of_alice(users: tuple[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the first user that lives until it is killed."""
    who = pwd.getpwnam(users[0])
    process = subprocess.Popen(
        ["sleep", "1000"], user=who.pw_uid, group=who.pw_gid, extra_groups=[], cwd="/"
    )
    yield process
    process.kill()
    process.wait()


@needs_root
def test_a_lease_is_held_by_a_process_of_ones_own_and_root_may_name_any(
    daemon: Daemon, users: tuple[str, str], process_of_alice: subprocess.Popen[bytes]
) -> None:
    alice, bob = users
    wanted = {"environment": {}, "pid": process_of_alice.pid, "claim": {"memory": 1 << 29}}
    status, content = call(daemon, bob, "POST", "/v1/holds", wanted)
    assert (status, json.loads(content)["error"]["code"]) == (403, "not_allowed")
    assert str(process_of_alice.pid) in content
    for user in (alice, "root"):
        status, content = call(daemon, user, "POST", "/v1/holds", {**wanted, "wait": 0})
        assert status == 201, content
        assert json.loads(content)["user"] == user
        job = json.loads(content)["id"]
        # Who asked has left at once, so it may have been dropped before anybody looked.
        daemon.wait_until(job, "active", "ended")
        call(daemon, "root", "POST", f"/v1/jobs/{job}/cancel")


@needs_root
def test_a_user_adopts_their_own_process_and_an_admin_any_in_the_name_of_its_user(
    daemon: Daemon, users: tuple[str, str], admin: str
) -> None:
    alice, bob = users
    for caller in (alice, admin, "root"):
        with process_on_gpu(daemon, alice) as process:
            status, content = call(daemon, bob, "POST", "/v1/adoptions", {"pid": process.pid})
            assert (status, json.loads(content)["error"]["code"]) == (403, "not_allowed")
            status, content = call(daemon, caller, "POST", "/v1/adoptions", {"pid": process.pid})
            assert status == 201, content
            job = json.loads(content)
            assert (job["user"], job["adopted"]) == (alice, True)
            said = [each["detail"] for each in daemon.job(job["id"])["events"]]
            assert any(f"adopted by {caller}" in (each or "") for each in said)
            assert call(daemon, alice, "POST", f"/v1/jobs/{job['id']}/keep")[0] == 200
        daemon.wait_until(job["id"], "ended")


@needs_root
def test_the_environment_of_a_lease_is_told_to_its_owner_and_its_release_is_theirs(
    daemon: Daemon, users: tuple[str, str], process_of_alice: subprocess.Popen[bytes]
) -> None:
    alice, bob = users
    job = held_by(daemon, alice, process_of_alice.pid)
    target = f"/v1/jobs/{job}/environment"
    assert call(daemon, bob, "GET", target)[0] == 403
    for user in (alice, "root"):
        status, content = call(daemon, user, "GET", target)
        assert (status, json.loads(content)["set"]["GPULEASE_JOB"]) == (200, str(job))
        assert "xyzzy" not in content, "what the lease does not change is not told"
    assert call(daemon, bob, "POST", f"/v1/jobs/{job}/cancel")[0] == 403
    assert call(daemon, bob, "POST", f"/v1/jobs/{job}/extend", {"by": 60})[0] == 403
    assert call(daemon, bob, "POST", f"/v1/jobs/{job}/keep")[0] == 403
    assert call(daemon, alice, "POST", f"/v1/jobs/{job}/cancel")[0] == 200
    assert daemon.wait_until(job, "ended")["outcome"] == "released"


@needs_root
def test_a_lease_that_root_takes_away_was_cancelled_and_not_released(
    daemon: Daemon, users: tuple[str, str], process_of_alice: subprocess.Popen[bytes]
) -> None:
    job = held_by(daemon, users[0], process_of_alice.pid)
    call(daemon, "root", "POST", f"/v1/jobs/{job}/cancel")
    ended = daemon.wait_until(job, "ended")
    assert ended["outcome"] == "cancelled"
    assert "root" in ended["reason"]
    assert process_of_alice.poll() is None


def held_by(daemon: Daemon, user: str, pid: int) -> int:
    """Return an active lease of `user` for `pid`; who asks lives until it is granted."""
    claim = {"memory": 1 << 29, "time_limit": 3600}
    body = {"environment": {"SECRET": "xyzzy"}, "pid": pid, "claim": claim}
    asker = subprocess.Popen(
        [sys.executable, "-c", _CALL, user, str(daemon.socket), "POST", "/v1/holds",
         json.dumps(body)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    assert asker.stdout is not None
    status, content = json.loads(asker.stdout.readline())
    assert status == 201, content
    job = int(json.loads(content)["id"])
    daemon.wait_until(job, "active")
    asker.communicate()
    return job


# As a user with groups that no database gives them, as after newgrp(1) or in a container.
_WITH_GROUPS = _CALL.replace("os.initgroups(user, who.pw_gid)", "os.setgroups(range(*GROUPS))")


@needs_root
@pytest.mark.parametrize("count", [0, 4000])
def test_a_job_has_the_groups_that_its_caller_had_and_not_those_of_the_database(
    daemon: Daemon, users: tuple[str, str], count: int
) -> None:
    alice, _ = users
    groups = 50_000, 50_000 + count
    program = _WITH_GROUPS.replace("GROUPS", str(groups))
    body = {"argv": ["id", "-G"], "cwd": "/", "environment": {"PATH": "/usr/bin:/bin"},
            "claim": {"memory": 1 << 29}}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, alice, str(daemon.socket), "POST", "/v1/jobs",
         json.dumps(body)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, content = json.loads(done.stdout)
    assert status == 201, content
    job = json.loads(content)["id"]
    assert daemon.wait_until(job, "ended")["exit_status"] == 0
    seen = daemon.run("logs", str(job)).stdout.split()
    assert sorted(map(int, seen)) == sorted({pwd.getpwnam(alice).pw_gid, *range(*groups)})


@needs_root
def test_the_jobs_of_another_user_are_cancelled_by_admins_only_and_all_or_none(
    daemon: Daemon, users: tuple[str, str], admin: str
) -> None:
    alice, bob = users
    of_alice, of_bob = (submit(daemon, user, "tail", "-f", "/dev/null") for user in users)
    for body in ({"user": alice}, {"jobs": [of_bob, of_alice]}, {"jobs": [of_alice], "name": "x"}):
        status, content = call(daemon, bob, "POST", "/v1/jobs/cancel", body)
        assert (status, json.loads(content)["error"]["code"]) == (403, "not_allowed"), body
    assert {daemon.job(job)["outcome"] for job in (of_alice, of_bob)} == {None}
    status, content = call(daemon, bob, "POST", "/v1/jobs/cancel", {})
    assert (status, of_bob in {job["id"] for job in json.loads(content)["jobs"]}) == (200, True)
    status, content = call(
        daemon, admin, "POST", "/v1/jobs/cancel", {"user": alice, "name": "tai*"}
    )
    assert (status, json.loads(content)["count"]) == (200, 1)
    ended = daemon.wait_until(of_alice, "ended")
    assert any(admin in (event["detail"] or "") for event in ended["events"]), "who it was"
    daemon.wait_until(of_bob, "ended")
    for bad in ({"grace": -1}, {"name": "x" * 1000}, {"jobs": "17"}):
        assert call(daemon, alice, "POST", "/v1/jobs/cancel", bad)[0] == 400, bad


@needs_root
def test_waiting_jobs_are_edited_and_moved_by_their_owner_and_by_admins(
    daemon: Daemon, users: tuple[str, str], admin: str
) -> None:
    alice, bob = users
    of_alice, second = (submit(daemon, alice, "sleep", "600", held=True) for _ in range(2))
    of_bob = submit(daemon, bob, "sleep", "600", held=True)
    refused: tuple[tuple[str, str, dict[str, object]], ...] = (
        (bob, "edit", {"jobs": [of_bob, of_alice], "nice": 5}),
        (bob, "edit", {"jobs": [of_bob], "priority": "high"}),
        (bob, "edit", {"jobs": [of_bob], "nice": -1}),
        (bob, "move", {"jobs": [of_alice]}),
        (bob, "move", {"jobs": [of_bob], "before": of_alice}),
    )
    for user, verb, body in refused:
        status, content = call(daemon, user, "POST", f"/v1/jobs/{verb}", body)
        assert (status, json.loads(content)["error"]["code"]) == (403, "not_allowed"), body
    assert {daemon.job(job)["queue"]["nice"] for job in (of_alice, of_bob)} == {0}

    both = {"jobs": [of_alice, of_bob], "priority": "high", "name": "by admin"}
    assert call(daemon, admin, "POST", "/v1/jobs/edit", both)[0] == 200
    assert {daemon.job(job)["name"] for job in (of_alice, of_bob)} == {"by admin"}
    assert call(daemon, admin, "POST", "/v1/jobs/move", {"jobs": [of_bob], "before": of_alice})[0]
    assert call(daemon, alice, "POST", "/v1/jobs/move", {"jobs": [second]})[0] == 200
    shown = daemon.job(of_bob)
    assert [event["kind"] for event in shown["events"]][-2:] == ["edit", "move"]
    assert admin in shown["events"][-1]["detail"]
    bad: tuple[tuple[str, dict[str, object]], ...] = (
        ("edit", {"jobs": []}), ("edit", {"jobs": [of_alice]}), ("edit", {"nice": 1}),
        ("edit", {"jobs": [of_alice], "time_limit": -5}), ("edit", {"jobs": [0.5], "nice": 1}),
        ("move", {"jobs": [of_alice], "before": of_alice}), ("move", {"jobs": []}),
        ("edit", {"jobs": list(range(20_000)), "nice": 1}), ("edit", {"jobs": "1", "nice": 1}),
    )  # fmt: skip
    for verb, body in bad:
        assert call(daemon, alice, "POST", f"/v1/jobs/{verb}", body)[0] == 400, body
    missing = {"jobs": [1 << 62], "nice": 1}
    assert call(daemon, alice, "POST", "/v1/jobs/edit", missing)[0] == 404
    for job in (of_alice, second, of_bob):
        call(daemon, "root", "POST", f"/v1/jobs/{job}/cancel")
