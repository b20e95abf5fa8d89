"""`run --verbose` and `run --summary`: which GPUs a job has, and what it did with them."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

from .conftest import OnCards

G = 1024**3
BUS = "00000000:3B:00.0"


@pytest.fixture
def machine(on_cards: OnCards) -> tuple[Daemon, StandIn]:
    return on_cards(Card(total=80 * G, bus=BUS), Card(total=80 * G))


def test_verbose_names_each_gpu_as_frameworks_do(
    machine: tuple[Daemon, StandIn], tmp_path: Path
) -> None:
    daemon, _ = machine
    go = tmp_path / "go"
    wait = ("sh", "-c", f"until test -e {go}; do sleep 0.05; done")
    gpus = {each["index"]: each["uuid"] for each in daemon.status()["gpus"]}
    options = ("--mem", "4G", "--gpus", "2", "--split", "2", "--verbose")

    running = daemon.open("run", *options, "--", *wait, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    lines = [running.stderr.readline().rstrip() for _ in range(2)]
    go.touch()

    assert running.communicate(timeout=120)[1] == ""
    first, second = lines
    both = {line.split(" -> ")[1].split(",")[0]: line for line in (first, second)}
    assert first.startswith("gpulease: /GPU:0, /GPU:1, cuda:0 -> ")
    assert second.startswith("gpulease: /GPU:2, /GPU:3, cuda:1 -> ")
    assert both[gpus[0]].endswith(", NVIDIA Stand-in, bus 0000:3b:00.0")
    assert both[gpus[1]].endswith(", NVIDIA Stand-in")


def test_show_has_the_same_map_while_the_job_runs(machine: tuple[Daemon, StandIn]) -> None:
    daemon, _ = machine
    job = daemon.submit("--mem", "4G", "--gpu", "0", "--", "sleep", "60")
    daemon.wait_until(job, "active")

    (device,) = daemon.job(job)["devices"]

    assert (device["names"], device["bus"]) == (["/GPU:0", "cuda:0"], "0000:3b:00.0")
    page = daemon.run("show", str(job)).stdout
    assert mentions(page, "/GPU:0, cuda:0", "0000:3b:00.0")
    daemon.cancel(job)
    daemon.wait_until(job, "ended")
    assert daemon.job(job)["devices"] == []


def test_the_summary_has_what_the_driver_showed(
    machine: tuple[Daemon, StandIn], tmp_path: Path
) -> None:
    daemon, stand_in = machine
    go = tmp_path / "go"
    wait = f"echo $$ > {tmp_path / 'pid'}; while ! test -e {go}; do sleep 0.1; done"
    running = daemon.open("run", "--mem", "4G", "--gpu", "0", "--summary", "--", "sh", "-c", wait,
                          stderr=-1)  # fmt: skip
    said_pid = tmp_path / "pid"
    pid = int(wait_for("it runs", lambda: said_pid.exists() and said_pid.read_text()))
    stand_in.change(0, used=3 * G, utilization=50, processes=[(pid, 3 * G)])
    wait_for("it is seen", lambda: (daemon.job(1)["leases"] or [{}])[0].get("peak"))
    wait_for("it is busy", lambda: daemon.job(1)["utilization"])
    go.touch()

    _, said = running.communicate(timeout=120)

    assert mentions(said.decode(), "summary of job 1", "3G of 4G", "%", "after the start")
    assert daemon.job(1)["first_use_at"] is not None


def test_a_job_that_used_no_gpu_has_no_figures(daemon: Daemon) -> None:
    # It has often ended before the command could ask for the map of its devices.
    for _ in range(3):
        options = ("--mem", "1G", "--summary", "--verbose")
        done = daemon.run("run", *options, "--", "sh", "-c", "exit 3", check=False)

        assert done.returncode == 3
        assert mentions(done.stderr, "/CPU:0", "stand in for simulated GPUs", "summary of job")


@pytest.mark.tensorflow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_the_steps_of_keras_are_in_the_summary_and_in_show(daemon: Daemon) -> None:
    source = """if True:
        import keras
        import numpy as np
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((40, 2)), np.ones((40, 1)), batch_size=4, verbose=0)
    """
    done = daemon.run("run", "--mem", "2G", "--summary", "--", sys.executable, "-c", source)

    assert mentions(done.stderr, "10 steps", "per second", "after the start")
    ended = daemon.jobs()[-1]
    assert (ended["steps"], ended["outcome"]) == (10, "exited")
    assert ended["steps_per_second"] > 0
    assert "10 steps" in daemon.run("show", str(ended["id"])).stdout
