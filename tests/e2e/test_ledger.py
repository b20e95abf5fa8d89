"""What is counted on a GPU before something is granted there, on the daemon as it runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

G = 1024**3
SELDOM = {"grace": "1s", "sample_every": "60s"}


def on(stand_in: StandIn, make_daemon: Callable[..., Daemon], **settings: str) -> Daemon:
    """Return a running daemon on the GPUs of `stand_in`."""
    made = make_daemon(
        simulate=None, environment=stand_in.environment(), settings={"grace": "1s"} | settings
    )
    return made.start()


def log(daemon: Daemon, job: int) -> str:
    return (daemon.state / f"jobs/{job}/stderr").read_text()


def states(daemon: Daemon, jobs: list[int]) -> list[Any]:
    return [daemon.job(job)["state"] for job in jobs]


def test_jobs_are_not_granted_beside_a_stranger_whom_no_timer_has_seen_yet(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    empty, taken = [Card(total=80 * G)] * 8, [Card(total=80 * G, used=70 * G)] * 8
    stand_in = StandIn(tmp_path, gpus=empty)
    daemon = on(stand_in, make_daemon, **SELDOM)
    stand_in.update(gpus=taken)
    hasty = daemon.run("run", "--no-wait", "--mem", "60G", "--", "true", check=False)
    assert (hasty.returncode, hasty.stdout) == (75, ""), "though the last readings had room"

    stand_in.update(gpus=empty)
    daemon.run("run", "--mem", "1G", "--", "true")
    stand_in.update(gpus=taken)
    jobs = [daemon.submit("--mem", "60G", "--", "sleep", "600") for _ in range(8)]

    assert states(daemon, jobs) == ["queued"] * 8
    assert "70G" in daemon.job(jobs[0])["reason"]


@pytest.mark.usefixtures("machines_pids")
def test_a_job_on_a_gpu_that_it_did_not_lease_is_shown_told_and_stopped(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=80 * G), Card(total=80 * G)])
    daemon = on(stand_in, make_daemon, overuse_grace="3s")
    job = daemon.submit("--mem", "4G", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]

    stand_in.change(1, used=600 << 20, processes=[(pid, 600 << 20)])
    wait_for("its owner is told", lambda: mentions(log(daemon, job), "600M", "GPU 1"))
    first, second = daemon.status()["gpus"]
    assert (first["memory"]["unmanaged"], second["memory"]["unmanaged"]) == (0, 600 << 20)
    assert [each["job"] for each in second["processes"]] == [job]
    page = daemon.run("status").stdout
    assert re.search(rf"sleep 600.*job {job}\b", page)
    alone = daemon.submit("--mem", "70G", "--gpus", "2", "--exclusive", "--", "true")
    wait_for(
        "why it waits",
        lambda: any(f"job {job} " in each["why"] for each in daemon.job(alone)["refusals"][1:]),
    )

    stand_in.change(1, used=30 * G, processes=[(pid, 30 * G)])
    end = daemon.wait_until(job, "ended")
    assert end["outcome"] == "over_lease"
    assert mentions(end["reason"], "30G", "GPU 1", "3s")
    assert "--gpus" in end["hint"]
    assert "3s" in log(daemon, job)
    stand_in.change(1, used=0, processes=[])
    daemon.wait_until(alone, "ended")


def test_compute_modes_decide_how_many_leases_a_gpu_takes(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=8 * G, compute_mode=2), Card(compute_mode=3)])
    daemon = on(stand_in, make_daemon)
    closed, single = daemon.status()["gpus"]
    assert (closed["state"], closed["memory"]["headroom"]) == ("prohibited", 0)
    assert (single["state"], single["compute_mode"]) == ("available", "exclusive process")
    page = daemon.run("status").stdout
    assert re.search("  0 .*prohibited", page)
    assert "nvidia-smi -i 0 -c DEFAULT" in daemon.run("doctor", check=False).stdout

    first, second = (daemon.submit("--mem", "4G", "--", "sleep", "600") for _ in range(2))
    assert daemon.wait_until(first, "active")["leases"][0]["gpu"] == StandIn.uuid(1)
    assert daemon.status()["gpus"][1]["memory"]["headroom"] == 0
    refused = daemon.run("run", "--no-wait", "--mem", "4G", "--", "true", check=False)
    assert refused.returncode == 75
    assert re.search("GPU 0: .*prohibited", refused.stderr)
    assert daemon.job(second)["state"] == "queued"
    assert mentions(daemon.job(second)["reason"], "4G", f"job {first} ")

    stand_in.change(0, compute_mode=0)
    assert daemon.wait_until(second, "active")["leases"][0]["gpu"] == StandIn.uuid(0)


@pytest.mark.usefixtures("machines_pids")
def test_an_owner_is_told_when_a_stranger_takes_memory_of_the_lease(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=80 * G)])
    daemon = on(stand_in, make_daemon)
    job = daemon.submit("--mem", "60G", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]
    stand_in.change(0, used=41 * G, processes=[(pid, G), (1, 40 * G)])

    wait_for("its owner is told", lambda: "60G" in log(daemon, job))
    assert mentions(log(daemon, job), f"job {job} ", "40G", "20G")
    assert "60G" in daemon.run("show", str(job)).stdout
