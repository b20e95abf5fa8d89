"""Leases for processes that use GPUs already: `hold --pid` and `adopt`, on NVML's real ABI."""

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from daemon_rig import Daemon, wait_for
from gpulease.errors import AlreadyLeased, GpuleaseError
from gpulease.wire.requests import AdoptRequest
from nvml_stand_in import Card

from .conftest import OnCards

G = 1024**3
pytestmark = pytest.mark.usefixtures("machines_pids")


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "600"])
    try:
        yield made
    finally:
        made.kill()
        made.wait()


On = Callable[..., Daemon]


@pytest.fixture
def on(on_cards: OnCards) -> On:
    """Return what starts a daemon on 80 GiB GPUs where processes hold these bytes."""

    def start(*used: dict[int, int]) -> Daemon:
        cards = [
            Card(total=80 * G, used=sum(held.values()), processes=[*held.items()]) for held in used
        ]
        return on_cards(*cards)[0]

    return start


def leases(daemon: Daemon, number: int) -> list[tuple[str, int]]:
    labels = {gpu["uuid"]: gpu["label"] for gpu in daemon.status()["gpus"]}
    return [(labels[each["gpu"]], each["memory"]) for each in daemon.job(number)["leases"]]


def hold(daemon: Daemon, pid: int, *options: str) -> int:
    ran = daemon.run("hold", "--pid", str(pid), "--json", *options)
    return int(json.loads(ran.stdout)["job"]["id"])


def refused(daemon: Daemon, *command: str) -> str:
    ran = daemon.run(*command, check=False)
    assert ran.returncode in (2, 75, 125), ran
    assert ran.stdout == ""
    return str(ran.stderr)


def test_a_process_holds_the_gpu_that_it_uses_and_its_memory_counts_once(
    on: On, stranger: subprocess.Popen[bytes]
) -> None:
    daemon = on({}, {stranger.pid: 60 * G})
    number = hold(daemon, stranger.pid)
    assert leases(daemon, number) == [("1", 60 * G)]
    job = daemon.job(number)
    assert (job["state"], job["adopted"]) == ("active", True)
    assert "framework" not in job["leases"][0]["enforced_by"]
    assert not job["devices"]
    assert "adopted" in daemon.run("show", str(number)).stdout
    memory = daemon.status()["gpus"][1]["memory"]
    assert (memory["committed"], memory["unmanaged"], memory["headroom"]) == (60 * G, 0, 20 * G)
    stranger.kill()
    stranger.wait()
    assert daemon.wait_until(number, "ended")["outcome"] == "released"


def test_on_a_drained_gpu_it_is_refused(on: On, stranger: subprocess.Popen[bytes]) -> None:
    daemon = on({stranger.pid: 30 * G}, {})
    daemon.run("drain", "0", "--why", "new fan")
    assert "new fan" in refused(daemon, "adopt", str(stranger.pid))
    assert daemon.status()["gpus"][0]["memory"]["unmanaged"] == 30 * G


def test_an_admin_adopts_what_runs_without_a_lease(
    on: On, stranger: subprocess.Popen[bytes]
) -> None:
    daemon = on({stranger.pid: 30 * G}, {})
    page = daemon.run("adopt", str(stranger.pid), "--for", "8h").stdout
    assert "30G of GPU 0" in page
    (job,) = daemon.client.jobs(everything=True).jobs
    assert job.claim.time_limit == 8 * 3600
    wait_for("it is held", lambda: daemon.job(job.id)["state"] == "active")
    job = daemon.client.job(job.id)  # its process is noted with its start, after the grant
    assert (job.name, job.kind, job.pid) == ("sleep", "hold", stranger.pid)
    assert "framework" not in daemon.job(job.id)["leases"][0]["enforced_by"]
    for command in (["adopt"], ["hold", "--mem", "23G", "--pid"]):
        assert f"has a lease, job {job.id}" in refused(daemon, *command, str(stranger.pid))
    with pytest.raises(AlreadyLeased):
        daemon.client.adopt(AdoptRequest(stranger.pid, key="another"))
    with process() as idle:
        assert "uses no GPU" in refused(daemon, "adopt", str(idle.pid))
        held = hold(daemon, idle.pid, "--mem", "1G")
        why = refused(daemon, "hold", "--mem", "1G", "--pid", str(idle.pid))
        assert f"has a lease, job {held}" in why
    assert "no such process" in refused(daemon, "adopt", "4194000")


def test_a_request_that_is_repeated_after_a_lost_answer_adopts_once(
    on: On, stranger: subprocess.Popen[bytes]
) -> None:
    daemon = on({stranger.pid: 30 * G})
    request = AdoptRequest(stranger.pid, key="one")
    assert daemon.client.adopt(request).id == daemon.client.adopt(request).id
    assert len(daemon.client.jobs(everything=True).jobs) == 1


def test_requests_at_the_same_time_adopt_once(on: On, stranger: subprocess.Popen[bytes]) -> None:
    daemon = on({stranger.pid: 30 * G})

    def ask(_: int) -> bool:
        try:
            daemon.client.adopt(AdoptRequest(stranger.pid))
        except GpuleaseError:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))).count(True) == 1
    assert "runs below it" in refused(daemon, "adopt", "1")


def test_a_process_of_a_job_is_not_adopted(on: On) -> None:
    daemon = on({})
    job = daemon.submit("--mem", "30G", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]
    assert f"job {job}" in refused(daemon, "adopt", str(pid))


def test_it_survives_a_restart_of_the_daemon(on: On, stranger: subprocess.Popen[bytes]) -> None:
    daemon = on({stranger.pid: 30 * G})
    number = hold(daemon, stranger.pid)
    daemon.kill()
    daemon.start()
    job = daemon.job(number)
    assert (job["state"], job["adopted"]) == ("active", True)
    stranger.kill()
    stranger.wait()
    assert daemon.wait_until(number, "ended")["outcome"] == "released"
