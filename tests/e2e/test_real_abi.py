"""The whole daemon on NVML's real ABI: strangers, lost and silent GPUs, drivers that are gone."""

import os
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from daemon_rig import Daemon, wait_for
from nvml_stand_in import HANG, Card, StandIn

from .conftest import OnCards

G = 1024**3


@pytest.mark.usefixtures("machines_pids")
def test_what_a_stranger_holds_cannot_be_leased_and_status_names_them(
    on_cards: OnCards, stranger: subprocess.Popen[bytes]
) -> None:
    card = Card(total=80 * G, used=60 * G, processes=[(stranger.pid, 60 * G)])
    daemon, _ = on_cards(card)
    shown = daemon.status()
    assert shown["driver"]
    (gpu,) = shown["gpus"]
    assert (gpu["memory"]["unmanaged"], gpu["memory"]["headroom"]) == (60 * G, 20 * G)
    (process,) = gpu["processes"]
    assert process["pid"] == stranger.pid
    assert process["user"] == Path(f"/proc/{stranger.pid}").owner()
    assert process["command"] == "sleep 600"
    assert process["job"] is None
    born = datetime.fromtimestamp(psutil.Process(stranger.pid).create_time(), UTC)
    assert abs(datetime.fromisoformat(process["started_at"]) - born) < timedelta(seconds=1)
    page = daemon.run("status").stdout
    assert str(stranger.pid) in page
    assert "sleep 600" in page
    assert "without a lease for " in page
    refused = daemon.run("run", "--mem", "21G", "--no-wait", "--", "true", check=False)
    assert refused.returncode == 75
    assert "60G" in refused.stderr
    assert daemon.run("run", "--mem", "20G", "--no-wait", "--", "true").returncode == 0


@pytest.mark.usefixtures("machines_pids")
def test_the_utilization_of_each_process_is_shown_where_it_is_known(
    on_cards: OnCards, stranger: subprocess.Popen[bytes]
) -> None:
    busy, idle = stranger.pid, os.getpid()
    card = Card(used=2 * G, utilization=50, processes=[(busy, G), (idle, G)])
    daemon, stand_in = on_cards(card)

    def known() -> dict[int, int | None]:
        (gpu,) = daemon.status()["gpus"]
        return {each["pid"]: each["utilization"] for each in gpu["processes"]}

    wait_for("it is unknown", lambda: known() == {busy: None, idle: None})
    stand_in.change(0, samples=[(busy, 40)])
    wait_for("the driver has samples", lambda: known() == {busy: 40, idle: 0})
    stand_in.change(0, samples=(), processes=[(busy, G)])
    wait_for("one is alone", lambda: known() == {busy: 50})


def test_a_lost_gpu_takes_no_lease_and_the_healthy_one_beside_it_does(
    on_cards: OnCards,
) -> None:
    daemon, stand_in = on_cards(Card(), Card(), driver_deadline="1s")
    stand_in.change(0, lost=True)
    wait_for("the loss is seen", lambda: daemon.status()["gpus"][0]["state"] == "lost")
    healthy = daemon.status()["gpus"][1]["uuid"]
    out = daemon.run("run", "--mem", "60G", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout
    assert out.strip() == healthy
    second = daemon.run("run", "--gpus", "2", "--mem", "1G", "--no-wait", "--", "true", check=False)
    assert second.returncode == 75
    stand_in.change(0, lost=False)
    assert daemon.run("run", "--gpus", "2", "--mem", "1G", "--", "true").returncode == 0


def test_status_answers_while_the_driver_of_one_gpu_does_not(
    on_cards: OnCards,
) -> None:
    daemon, stand_in = on_cards(Card(), Card(), driver_deadline="1s")
    stand_in.change(1, delays={"nvmlDevice*": HANG})

    def silent() -> bool:
        begun = time.monotonic()
        state = daemon.status()["gpus"][1]["state"]
        assert time.monotonic() - begun < 10, "status waited for the driver"
        return bool(state == "unreadable")

    wait_for("the silence is seen", silent)
    uuid = daemon.status()["gpus"][0]["uuid"]
    out = daemon.run("run", "--mem", "1G", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout
    assert out.strip() == uuid
    stand_in.change(1, delays={})
    wait_for("it speaks again", lambda: daemon.status()["gpus"][1]["state"] == "available")


def test_a_machine_whose_driver_is_not_loaded_gets_an_error_with_a_way_out(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    from nvml_stand_in import Code

    stand_in = StandIn(tmp_path, faults={"nvmlInit*": Code.DRIVER_NOT_LOADED})
    made = make_daemon(simulate=None)
    done = subprocess.run(
        made.command(), capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **stand_in.environment()},
    )  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr
    assert "modprobe nvidia" in done.stderr


def test_a_job_beside_a_busy_one_says_so_and_waits_where_there_are_too_many(
    on_cards: OnCards,
) -> None:
    daemon, _ = on_cards(Card(total=80 * G, utilization=97))
    job = ("--mem", "8G", "--", "sleep", "600")
    first = daemon.submit(*job)
    daemon.wait_until(first, "active")
    assert "shares" not in daemon.run("show", str(first)).stdout
    second = daemon.open("run", *job, stderr=subprocess.PIPE)
    assert second.stderr is not None
    assert (
        f"shares GPU 0 with job {first}; both may run slower".encode() in second.stderr.readline()
    )
    third = daemon.submit(*job)
    daemon.wait_until(third, "active")
    shown = daemon.run("show", str(first)).stdout
    assert f"shares      GPU 0 with jobs {first + 1}, {third}; all may run slower" in shown
    # 0.97, and 0.3 for each of them, as nothing is known of what such jobs usually use.
    fourth = daemon.submit(*job)
    wait_for("it waits", lambda: daemon.job(fourth)["refusals"])
    assert [each["kind"] for each in daemon.job(fourth)["refusals"]] == ["busy"]
    (gpu,) = (line for line in daemon.run("status").stdout.splitlines() if " 97%" in line)
    assert gpu.endswith("busy")
