"""Thirty jobs share the GPUs of three nodes, with a greedy one and a stranger among them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from daemon_rig import wait_for

from .cluster import Cluster
from .leased_cluster import Samples, leases, leasing

MIB = 1024**2
_JOBS = 30
_SEED = 16
_SHARDS = (2, 4, 8, 16, 24, 32, 48, 64, 88, 96)
_WITHIN_S = 240.0
_LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")


@dataclass
class Outcome:
    """How it went: the jobs by their numbers in Slurm, with the fields of `scontrol show job`."""

    cluster: Cluster
    samples: Samples
    jobs: Mapping[int, Mapping[str, str]]
    greedy: int


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    """Run all of it once."""
    with leasing() as cluster:
        stranger = cluster.nodes["n1"].stranger(1536 * MIB, gpu=0)
        with Samples(cluster) as samples:
            # On an empty cluster Slurm gives it the first GPU, where the stranger is. It ends
            # before the others begin: each refusal replaces the comment of the one before.
            whole = cluster.sbatch(work(64, 1), "--gres=gpu:1", "--output=/dev/null")
            wait_for("the first job ends", lambda: not live(cluster), _WITHIN_S)
            greedy = cluster.sbatch(work(900, 300), "--gres=shard:2", "--output=greedy.out")
            jobs = [whole, *submit_mixed(cluster, random.Random(_SEED))]
            wait_for("all jobs end", lambda: not live(cluster), _WITHIN_S)
        stranger.communicate()
        yield Outcome(cluster, samples, {job: cluster.job(job) for job in jobs}, greedy)


def work(mib: int, seconds: float) -> str:
    return f"exec python /etc/slurm/work.py {mib} {seconds:.1f}"


def submit_mixed(cluster: Cluster, dice: random.Random) -> list[int]:
    """Submit jobs of mixed sizes, every tenth for a whole GPU; each takes a part of its lease."""
    jobs: list[int] = []
    for number in range(_JOBS):
        gres = "gpu:1" if number % 10 == 5 else f"shard:{dice.choice(_SHARDS)}"
        script = work(dice.randrange(16, 96), dice.uniform(0.5, 3))
        user = dice.choice(("alice", "bob"))
        jobs.append(cluster.sbatch(script, f"--gres={gres}", "--output=/dev/null", user=user))
    return jobs


def live(cluster: Cluster) -> Sequence[str]:
    """Return the jobs that wait or run; a held job waits."""
    return cluster.run("squeue", "--noheader", f"--states={','.join(_LIVE)}").stdout.split()


def test_no_job_is_lost(outcome: Outcome) -> None:
    lost = {
        number: (job["JobState"], job.get("ExitCode"), _comment(outcome, number))
        for number, job in outcome.jobs.items()
        if job["JobState"] != "COMPLETED"
    }
    assert not lost
    assert len(outcome.jobs) == _JOBS + 1


def test_leases_on_each_gpu_are_within_it_at_every_moment(outcome: Outcome) -> None:
    assert not outcome.samples.violations
    assert outcome.samples.neighbours.keys() >= outcome.jobs.keys()


def test_a_job_over_its_lease_is_stopped_with_a_reason(outcome: Outcome) -> None:
    cluster, greedy = outcome.cluster, outcome.greedy
    assert cluster.job(greedy)["JobState"] == "CANCELLED"
    assert "under a lease of 512M" in cluster.run("scontrol", "show", "job", str(greedy)).stdout
    assert "its lease is 512M" in (cluster.home / "alice/greedy.out").read_text()


def test_its_neighbours_live(outcome: Outcome) -> None:
    neighbours = outcome.samples.neighbours[outcome.greedy]
    assert neighbours
    assert {outcome.jobs[job]["JobState"] for job in neighbours} == {"COMPLETED"}


def test_a_stranger_sends_a_job_elsewhere(outcome: Outcome) -> None:
    number, job = next(iter(outcome.jobs.items()))
    assert "outside any lease" in _comment(outcome, number)
    assert job["NodeList"] in ("n2", "n3")


def test_no_lease_is_left(outcome: Outcome) -> None:
    nodes = outcome.cluster.nodes.values()
    wait_for("all leases end", lambda: not any(map(leases, nodes)))


def _comment(outcome: Outcome, job: int) -> str:
    shown = outcome.cluster.scontrol("show", "job", str(job))
    return shown.partition("AdminComment=")[2]
