"""Which GPUs a job gets: by name, model and size, on a machine with two kinds of GPUs."""

import json
from collections.abc import Callable

import pytest

from daemon_rig import Daemon
from nvml_stand_in import Card
from topologies import bus, nvml_ancestors, nvml_links

from .conftest import OnCards

G = 1024**3


@pytest.fixture
def mixed(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Return a daemon with two GPUs of 24 GiB and two of 80 GiB."""
    made: Daemon = make_daemon(simulate="2x24G:T4,2x80G:A100", settings={"grace": "2s"})
    return made.start()


def where(daemon: Daemon, job: int) -> list[str]:
    labels = {gpu["uuid"]: gpu["label"] for gpu in daemon.status()["gpus"]}
    leases = daemon.wait_until(job, "active", "ended")["leases"]
    return [labels[each["gpu"]] for each in leases]


def run(daemon: Daemon, *options: str) -> int:
    return daemon.submit(*options, "--", "sleep", "600")


def test_a_job_gets_the_gpus_that_it_asks_for(mixed: Daemon) -> None:
    uuids = {gpu["label"]: gpu["uuid"] for gpu in mixed.status()["gpus"]}
    assert where(mixed, run(mixed, "--mem", "1G", "--gpu", "1,3")) == ["1", "3"]
    assert where(mixed, run(mixed, "--mem", "1G", "--gpu", uuids["2"][:12])) == ["2"]
    assert where(mixed, run(mixed, "--mem", "1G", "--gpu", "2,3", "--gpus", "1"))[0] in "23"
    assert where(mixed, run(mixed, "--mem", "1G", "--gpu-model", "a100"))[0] in "23"
    assert where(mixed, run(mixed, "--mem", "1G", "--min-vram", "40G"))[0] in "23"
    pair = where(mixed, run(mixed, "--mem", "60G", "--gpus", "2", "--same-model"))
    assert pair == ["2", "3"]


def test_a_job_that_waits_says_for_which_gpus(mixed: Daemon) -> None:
    first = run(mixed, "--mem", "20G", "--gpu", "0")
    assert where(mixed, first) == ["0"]
    waits = run(mixed, "--mem", "20G", "--gpu", "0")
    page = mixed.run("show", str(waits)).stdout
    assert "GPU 0" in page
    assert "not one of the GPUs asked for" in page
    assert "no --gpu" in page
    job = mixed.job(waits)
    assert (job["claim"]["named_labels"], job["waits_for"]) == (["0"], [first])
    mixed.run("edit", str(waits), "--gpu", "any", "--gpu-model", "A100")
    assert where(mixed, waits)[0] in "23"


def test_a_command_in_a_job_takes_the_gpu_that_it_names(mixed: Daemon) -> None:
    uuids = {gpu["label"]: gpu["uuid"] for gpu in mixed.status()["gpus"]}
    inner = " ".join([*mixed.gpulease("run", "--mem", "1G"), "--gpu", "{}", "--", "sh", "-c"])
    inner += " 'echo $CUDA_VISIBLE_DEVICES'"
    said = mixed.run("run", "--mem", "4G", "--gpu", "1,2", "--", "sh", "-c", inner.format("2"))
    assert said.stdout.strip() == uuids["2"]
    outside = mixed.run(
        "run", "--mem", "4G", "--gpu", "1,2", "--", "sh", "-c", inner.format("3"), check=False
    )
    assert "asked for" in outside.stderr


def test_a_job_on_two_gpus_gets_a_linked_pair_and_another_waits_for_one(on_cards: OnCards) -> None:
    known = zip(nvml_links("bridged pairs"), nvml_ancestors("bridged pairs"), strict=True)
    cards = [
        Card(bus=bus(index), links=links, ancestors=near, node=index // 4, cpus=[index])
        for index, (links, near) in enumerate(known)
    ]
    daemon, _ = on_cards(*cards[:4])
    single = run(daemon, "--mem", "60G", "--gpu", "0")
    assert where(daemon, single) == ["0"]
    pair = run(daemon, "--mem", "60G", "--gpus", "2")
    assert where(daemon, pair) == ["2", "3"]
    assert daemon.job(pair)["nvlinks"] == 4
    assert "GPUs 2 and 3, NVLink x4" in daemon.run("show", str(pair)).stdout

    daemon.run("cancel", str(pair))
    assert where(daemon, run(daemon, "--mem", "60G", "--gpu", "3")) == ["3"]
    waits = run(daemon, "--mem", "60G", "--gpus", "2", "--linked")
    assert "NVLink" in daemon.job(waits)["reason"]
    daemon.run("edit", str(waits), "--no-linked")
    assert where(daemon, waits) == ["1", "2"]
    assert daemon.job(waits)["nvlinks"] == 0
    refused = daemon.run("run", "--gpus", "3", "--linked", "--mem", "1G", "--", "true", check=False)
    assert refused.returncode == 125
    assert "at most 2" in refused.stderr

    assert "NV4" in daemon.run("status", "--topology").stdout
    shown = json.loads(daemon.run("status", "--topology", "--json").stdout)
    assert [gpu["cpus"] for gpu in shown["gpus"]] == ["0", "1", "2", "3"]
    assert len(shown["gpus"][0]["links"]) == 3
    assert "2 of 6 pairs" in daemon.run("doctor", check=False).stdout
    mistaken = daemon.run("status", "--topology", "--watch", "1s", check=False)
    assert mistaken.returncode == 2
