"""What a second user of the machine may do with a job, and what they may see of it."""

import json
from collections.abc import Iterator

import pytest

from daemon_rig import Daemon
from e2e.users import OTHER, STRANGER, call, daemon_for_all, job, needs_root
from goldens import mentions

pytestmark = needs_root


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_for_all(hide_commands="true") as made:
        yield made


def submitted(daemon: Daemon, *argv: str) -> int:
    environment = {"PATH": "/usr/bin:/bin", "TOKEN": "xyzzy"}
    wanted = job(*argv, memory=1 << 30, environment=environment)
    status, content = call(daemon, STRANGER, "POST", "/v1/jobs", wanted)
    assert status == 201, content
    return int(content["id"])


def test_a_job_runs_as_its_user(daemon: Daemon) -> None:
    number = submitted(daemon, "sh", "-c", "id -u; id -g; touch /root/x || echo not root")
    assert daemon.wait_until(number, "ended")["exit_status"] == 0
    assert daemon.run("logs", str(number)).stdout.split("\n")[:3] == [
        str(STRANGER), str(STRANGER), "not root",
    ]  # fmt: skip


def test_root_does_not_run_the_command_of_a_user_again(daemon: Daemon) -> None:
    number = submitted(daemon, "true")
    daemon.wait_until(number, "ended")
    refused = daemon.run("again", str(number), check=False)
    assert refused.returncode == 2 and mentions(refused.stderr, f"job {number}", "it is a job of")
    assert not [each for each in daemon.jobs() if each["id"] > number], "it would run as root"


def test_another_user_may_neither_end_change_nor_read_it(daemon: Daemon) -> None:
    number = submitted(daemon, "sh", "-c", "echo secret; sleep 600", "private.py")
    daemon.wait_until(number, "active")
    for verb, what, body in (
        ("POST", "cancel", None),
        ("POST", "extend", {"by": 60}),
        ("POST", "keep", None),
        ("GET", "logs", None),
        ("GET", "environment", None),
    ):
        status, content = call(daemon, OTHER, verb, f"/v1/jobs/{number}/{what}", body)
        assert (status, content["error"]["code"]) == (403, "not_allowed"), what
    for target in ("/v1/status", "/v1/jobs", f"/v1/jobs/{number}"):
        seen = json.dumps(call(daemon, OTHER, "GET", target)[1])
        assert "private.py" not in seen, "commands are hidden"
        assert "xyzzy" not in seen, "and what is in the environment is told to nobody"
        assert str(STRANGER) in seen, "but not that a job runs"
    pids = {who: call(daemon, who, "GET", target)[1]["pids"] for who in (STRANGER, OTHER)}
    assert len(pids[STRANGER]) == 2 and pids[OTHER] is None, "nor are its processes named"
    assert daemon.job(number)["state"] == "active"
    assert call(daemon, STRANGER, "POST", f"/v1/jobs/{number}/cancel")[0] == 200
    assert daemon.wait_until(number, "ended")["outcome"] == "cancelled"


def test_only_an_admin_drains_and_resumes(daemon: Daemon) -> None:
    for verb in ("drain", "resume"):
        status, content = call(daemon, OTHER, "POST", f"/v1/gpus/0/{verb}", {})
        assert (status, content["error"]["code"]) == (403, "not_allowed")
    assert daemon.status()["gpus"][0]["state"] == "available"
