"""What is counted on a GPU before something is granted there, on the daemon as it runs."""

import re
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card

from .conftest import OnCards

G = 1024**3


def log(daemon: Daemon, job: int) -> str:
    return (daemon.state / f"jobs/{job}/stderr").read_text()


def states(daemon: Daemon, jobs: list[int]) -> list[Any]:
    return [daemon.job(job)["state"] for job in jobs]


def test_jobs_are_not_granted_beside_a_stranger_whom_no_timer_has_seen_yet(
    on_cards: OnCards,
) -> None:
    empty, taken = [Card(total=80 * G)] * 8, [Card(total=80 * G, used=70 * G)] * 8
    daemon, stand_in = on_cards(*empty, sample_every="60s")
    stand_in.update(gpus=taken)
    hasty = daemon.run("run", "--no-wait", "--mem", "60G", "--", "true", check=False)
    assert (hasty.returncode, hasty.stdout) == (75, ""), "though the last readings had room"

    stand_in.update(gpus=empty)
    daemon.run("run", "--mem", "1G", "--", "true")
    # No pass that has seen empty GPUs is under way when they are taken.
    daemon.run("pause")
    stand_in.update(gpus=taken)
    jobs = [daemon.submit("--mem", "60G", "--", "sleep", "600") for _ in range(8)]
    daemon.run("unpause")

    wait_for("the reason", lambda: "70G" in (daemon.job(jobs[0])["reason"] or ""))
    assert states(daemon, jobs) == ["queued"] * 8


@pytest.mark.usefixtures("machines_pids")
def test_a_job_on_a_gpu_that_it_did_not_lease_is_shown_told_and_stopped(
    on_cards: OnCards,
) -> None:
    daemon, stand_in = on_cards(Card(total=80 * G), Card(total=80 * G), overuse_grace="3s")
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
