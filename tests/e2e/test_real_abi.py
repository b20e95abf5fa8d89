"""The whole daemon on NVML's real ABI: strangers, lost and silent GPUs, drivers that are gone."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from daemon_rig import Daemon, wait_for
from nvml_stand_in import HANG, Card, StandIn

G = 1024**3


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that nobody leased anything for."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def on(make_daemon: Callable[..., Daemon], tmp_path: Path, *cards: Card) -> tuple[Daemon, StandIn]:
    stand_in = StandIn(tmp_path, gpus=cards)
    made: Daemon = make_daemon(
        simulate=None,
        environment=stand_in.environment(),
        settings={"grace": "1s", "driver_deadline": "1s"},
    )
    return made.start(), stand_in


@pytest.mark.usefixtures("machines_pids")
def test_what_a_stranger_holds_cannot_be_leased_and_status_names_them(
    make_daemon: Callable[..., Daemon], tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    card = Card(total=80 * G, used=60 * G, processes=[(stranger.pid, 60 * G)])
    daemon, _ = on(make_daemon, tmp_path, card)
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


def test_a_process_that_shuts_the_hook_out_is_shown_with_its_job_and_says_why(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon, stand_in = on(make_daemon, tmp_path, Card(total=80 * G))
    python = [sys.executable, "-I", "-c", "import time; time.sleep(600)"]
    job = daemon.submit("--mem", "30G", "--", *python)
    pid = daemon.wait_until(job, "active")["pid"]
    stand_in.change(0, used=10 * G, processes=[(pid, 10 * G)])
    if daemon.job(job)["hook"] is None:
        pytest.skip("not every user can read the hooks where this checkout is")
    (unheld,) = wait_for("it is noticed", lambda: daemon.job(job)["unheld"])
    assert unheld["pid"] == pid
    assert "-I" in unheld["why"]
    assert f"process {pid} ({sys.executable} -I -c" in daemon.run("show", str(job)).stdout
    told = [each for each in daemon.job(job)["events"] if each["kind"] == "notice"]
    assert str(pid) in told[0]["detail"]
    # Nothing was put around it, and nothing says that something was.
    status = daemon.status()
    lacks = {each["rung"]: each["why"] for each in status["enforcement"] if not each["available"]}
    assert lacks.keys() >= {"driver", "devices"}
    examined = json.loads(daemon.run("doctor", "--json", check=False).stdout)["checks"]
    said = {each["message"] for each in examined}
    assert said >= {f"not enforced by {rung}: {why}" for rung, why in lacks.items()}


def test_a_lost_gpu_takes_no_lease_and_the_healthy_one_beside_it_does(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon, stand_in = on(make_daemon, tmp_path, Card(), Card())
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
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon, stand_in = on(make_daemon, tmp_path, Card(), Card())
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


def memory_when(daemon: Daemon, used: int) -> dict[str, int]:
    """Return the ledger of the first GPU when so much of it is seen to be used."""

    def seen() -> dict[str, int] | None:
        memory: dict[str, int] = daemon.status()["gpus"][0]["memory"]
        return memory if memory["used"] == used else None

    return wait_for(f"{used} bytes are seen to be used", seen)


def test_what_an_mps_server_holds_for_a_job_is_not_unmanaged_beside_its_lease(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", program)
    server = subprocess.Popen([program, "600"])
    try:
        daemon, stand_in = on(make_daemon, tmp_path, Card(total=80 * G))
        job = daemon.submit("--mem", "30G", "--", "sleep", "600")
        daemon.wait_until(job, "active")
        stand_in.change(0, used=20 * G, processes=[(server.pid, 20 * G)])
        memory = memory_when(daemon, 20 * G)
        assert (memory["committed"], memory["unmanaged"], memory["headroom"]) == (30 * G, 0, 50 * G)
        assert daemon.job(job)["leases"][0]["used"] is None, "not told apart is not nothing"
        assert "without a lease" not in daemon.run("status").stdout
        # More than the leases of those that run is somebody else's.
        stand_in.change(0, used=36 * G, processes=[(server.pid, 36 * G)])
        memory = memory_when(daemon, 36 * G)
        assert (memory["unmanaged"], memory["headroom"]) == (6 * G, 44 * G)
        daemon.cancel(job)
        daemon.wait_until(job, "ended")
        assert daemon.status()["gpus"][0]["memory"]["unmanaged"] == 36 * G
    finally:
        server.kill()
        server.wait()


def test_a_machine_whose_driver_is_not_loaded_gets_an_error_with_a_way_out(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    from nvml_stand_in import Code

    stand_in = StandIn(tmp_path, faults={"nvmlInit*": Code.DRIVER_NOT_LOADED})
    made = make_daemon(simulate=None)
    done = subprocess.run(
        made.command(), capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **stand_in.environment()},
    )  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr
    assert "modprobe nvidia" in done.stderr
