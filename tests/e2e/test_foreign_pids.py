"""A daemon in a pid namespace of its own, as in a container: whose pids does the driver tell?"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import PATIENCE_S, Daemon, wait_for
from nvml_stand_in import Card, Code, StandIn

G = 1024**3
HOST_PID = 4_000_000
"""Of no process in the namespace; some on the host may well have it."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"),
    reason="needs root, unshare and nsenter",
)


@dataclass
class Contained(Daemon):
    """A daemon that is process 1 of a pid namespace with a /proc of its own."""

    def command(self) -> list[str]:
        return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *super().command()]

    def gpulease(self, *arguments: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid()), "-p", "-m", *super().gpulease(*arguments)]

    def pid(self) -> int:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_for("it has its namespace", lambda: children.read_text().split())[0])

    def kill(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        os.kill(self.pid(), number)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[tuple[Contained, StandIn]]:
    stand_in = StandIn(tmp_path, gpus=[Card(total=24 * G)])
    daemon = Contained(
        tmp_path,
        simulate=None,
        settings={"grace": "1s", "overuse": "stop", "overuse_grace": "1s"},
        environment=stand_in.environment(),
    )
    yield daemon.start(), stand_in
    daemon.end_all()


def job_of(daemon: Daemon, size: str = "10G") -> tuple[int, int]:
    """Return a running job, and the pid of its process as the daemon knows it."""
    job = daemon.submit("--mem", size, "--", "sleep", "600")
    return job, int(daemon.wait_until(job, "active")["pid"])


def checks(daemon: Daemon) -> dict[str, dict[str, Any]]:
    examined = json.loads(daemon.run("doctor", "--json", check=False).stdout)
    return {each["name"]: each for each in examined["checks"]}


def watch(daemon: Daemon) -> dict[str, Any]:
    (rung,) = [each for each in daemon.status()["enforcement"] if each["rung"] == "watch"]
    return dict(rung)


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param([(HOST_PID, 10 * G)], id="the pids of the host"),
        pytest.param([], id="no process at all"),
    ],
)
def test_memory_that_may_be_a_jobs_is_not_counted_beside_its_lease(
    contained: tuple[Contained, StandIn], listed: list[tuple[int, int | None]]
) -> None:
    daemon, stand_in = contained
    assert "pids" not in checks(daemon), "with nothing on the GPU there is nothing to say"
    assert watch(daemon)["available"]
    job, _ = job_of(daemon)
    stand_in.change(0, used=10 * G, processes=listed)
    wait_for("it is noticed", lambda: not watch(daemon)["available"])
    (gpu,) = daemon.status()["gpus"]
    memory = gpu["memory"]
    assert (memory["unmanaged"], memory["headroom"]) == (0, 14 * G)
    (lease,) = daemon.job(job)["leases"]
    assert lease["used"] is None
    assert "watch" not in lease["enforced_by"]
    assert "namespace" in watch(daemon)["why"]
    assert checks(daemon)["pids"]["state"] == "warning"
    assert "--pid=host" in checks(daemon)["pids"]["mend"]
    # What is there beside the leases is not for lease.
    stand_in.change(0, used=15 * G)
    wait_for("it is seen", lambda: daemon.status()["gpus"][0]["memory"]["unmanaged"] == 5 * G)


def test_where_one_process_of_a_job_is_listed_all_is_as_usual(
    contained: tuple[Contained, StandIn],
) -> None:
    daemon, stand_in = contained
    job, pid = job_of(daemon)
    stand_in.change(0, used=10 * G, processes=[(pid, 10 * G)])
    wait_for("it is its job's", lambda: daemon.job(job)["leases"][0]["used"] == 10 * G)
    assert watch(daemon)["available"]
    assert "pids" not in checks(daemon)
    # From then on whoever is listed and in no job is a stranger, and whoever is not uses nothing.
    other, _ = job_of(daemon, "2G")
    stand_in.change(0, used=3 * G, processes=[(1, 3 * G)])
    wait_for("the stranger is seen", lambda: daemon.status()["gpus"][0]["memory"]["unmanaged"] > G)
    assert daemon.job(other)["leases"][0]["used"] == 0
    assert [each["user"] for each in daemon.status()["gpus"][0]["processes"]] == ["root"]


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(
            {"faults": {"nvmlDeviceGetComputeRunningProcesses*": Code.NO_PERMISSION}}, id="vGPU"
        ),
        pytest.param({"processes": []}, id="an empty list, as in WSL"),
    ],
)
def test_what_was_in_use_before_the_first_lease_is_promised_to_nobody(
    make_daemon: Callable[..., Daemon], tmp_path: Path, shown: dict[str, Any]
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=24 * G, used=8 * G, **shown)])
    daemon = make_daemon(simulate=None, environment=stand_in.environment()).start()
    job, _ = job_of(daemon)
    second = daemon.submit("--mem", "10G", "--", "true")

    def is_kept(used: int) -> None:
        stand_in.change(0, used=used)
        memory = wait_for(
            "it is seen",
            lambda: known if (known := daemon.status()["gpus"][0]["memory"])["used"] == used else 0,
        )
        assert (memory["unmanaged"], memory["headroom"]) == (8 * G, 6 * G)
        assert daemon.job(job)["leases"][0]["used"] is None, "unknown, not zero"
        assert daemon.job(second)["state"] == "queued"

    is_kept(8 * G)
    is_kept(18 * G)
    daemon.kill(signal.SIGTERM)
    daemon.start()
    is_kept(17 * G)
    stand_in.change(0, used=2 * G)
    daemon.wait_until(second, "ended")
