"""A part of the other tests on a newer Slurm; `make test-slurm` runs all of them on it."""

import json
from collections.abc import Iterator

import pytest

from daemon_rig import wait_for
from gpulease.units import GIB
from system.root import NoDebian

from .cluster import Cluster
from .leased_cluster import leases, leasing, where

_RELEASE = "24.11"
SLURM = {"GPULEASE_CLUSTER": "slurm"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        with leasing(["n1", "n2"], release=_RELEASE) as made:
            yield made
    except NoDebian as error:
        pytest.skip(f"no Slurm {_RELEASE}: {str(error)[-300:]}")


def test_it_is_the_newer_release(idle: Cluster) -> None:
    assert idle.run("srun", "--version").stdout.startswith(f"slurm-wlm {_RELEASE}.")


def test_srun_has_a_lease_in_the_foreground(idle: Cluster) -> None:
    show = "echo $GPULEASE_MEMORY; read line; echo $line"
    done = idle.run("srun", "--gres=shard:16", "sh", "-c", show, stdin="typed\n")
    assert done.stdout.split() == [str(4 * GIB), "typed"]


def test_batch_jobs_have_leases_on_the_gpus_that_slurm_chose(idle: Cluster) -> None:
    jobs = [idle.sbatch("sleep 300", "--gres=shard:64", "--nodelist=n1") for _ in range(2)]
    whole = idle.sbatch("sleep 300", "--gres=gpu:2", "--nodelist=n2")
    wait_for("all have leases", lambda: all(where(idle, job) for job in (*jobs, whole)))
    held = leases(idle.nodes["n1"])
    assert {held[job].leases[0].gpu for job in jobs} == {idle.nodes["n1"].uuid(it) for it in (0, 1)}
    assert [lease.memory for lease in leases(idle.nodes["n2"])[whole].leases] == [24 * GIB] * 2


def test_status_shows_the_gpu_of_a_job(idle: Cluster) -> None:
    jobs = [idle.sbatch("sleep 300", "--gres=shard:64", "--nodelist=n1") for _ in range(2)]
    wait_for("both have leases", lambda: all(where(idle, job) for job in jobs))
    shown = json.loads(idle.run("gpulease", "status", "--json", env=SLURM).stdout)
    assert sorted(job["leases"][0]["gpu"] for job in shown["jobs"]) == ["0", "1"]


def test_a_job_with_gpus_for_each_task_is_listed(idle: Cluster) -> None:
    idle.sbatch("sleep 300", "--ntasks=2", "--gpus-per-task=1")
    (shown,) = json.loads(idle.run("gpulease", "list", "--json", env=SLURM).stdout)["jobs"]
    assert shown["claim"]["gpus"] == 2


def test_a_refused_job_runs_on_another_node(idle: Cluster) -> None:
    strangers = [idle.nodes["n1"].stranger(GIB, gpu) for gpu in (0, 1)]
    job = idle.sbatch("sleep 300", "--gres=shard:96", "--exclude=n2")
    wait_for(
        "n1 refuses it",
        lambda: '"refused":1' in idle.scontrol("show", "job", str(job)),
    )
    idle.run("scancel", str(job))
    job = idle.sbatch("sleep 300", "--gres=shard:96")
    wait_for("it has a lease on n2", lambda: where(idle, job) == ["n2"])
    for each in strangers:
        each.communicate()
