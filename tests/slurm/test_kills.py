"""Daemons are killed under load: afterwards no lease is without a job, and no job without a lease.

How the jobs end is only counted: Slurm may fail one whose slurmd is killed while it starts it.

`make torture-slurm` runs more rounds.
"""

import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from daemon_rig import wait_for
from gpulease.errors import GpuleaseError

from .cluster import Cluster
from .leased_cluster import gpus_in, leases, leasing, over_promised
from .node import Node

_ROUNDS = int(os.environ.get("GPULEASE_SLURM_ROUNDS", "2"))
_SETTLED_WITHIN_S = 60.0
_SHARDS = (4, 8, 16, 32, 48)
_WAITS = 10
"""Jobs that wait or run at the beginning of each round."""
_LIVE = "PENDING,RUNNING,COMPLETING,CONFIGURING"


@dataclass
class Round:
    """One round: what was killed, and how long the leases differed from the jobs."""

    killed: Sequence[str]
    settled_s: float
    violations: Sequence[str]

    def __str__(self) -> str:
        wrong = "; ".join(self.violations) or "none"
        return f"killed {', '.join(self.killed)}: violations after {self.settled_s:.1f} s: {wrong}"


def test_leases_follow_jobs_although_daemons_are_killed() -> None:
    seed = int(os.environ.get("GPULEASE_SLURM_SEED", secrets.randbits(32)))
    dice = random.Random(seed)
    print(f"\nseed {seed}")
    rounds: list[Round] = []
    with leasing() as cluster:
        jobs: set[int] = set()
        for number in range(_ROUNDS):
            jobs |= submit(cluster, dice)
            rounds.append(one_round(cluster, dice))
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
        cluster.run("scancel", "--name=long", "--user=alice", user="root")
        with suppress(AssertionError):
            wait_for("the jobs end", lambda: not live(cluster), 90)
        # A killed slurmctld forgets the ends that it had not saved: those jobs would stay listed.
        cluster.run("scancel", "--user=alice", user="root")
        wait_for("all jobs end", lambda: not live(cluster), 90)
        wait_for("all leases end", lambda: not any(map(leases, cluster.nodes.values())))
        ended = Counter(state(cluster, job) for job in jobs)
    wrong = sum(len(each.violations) for each in rounds)
    print(f"{wrong} violations in {_ROUNDS} rounds; jobs: {dict(ended)}")
    assert not wrong, f"seed {seed}: {'; '.join(map(str, rounds))}"


def submit(cluster: Cluster, dice: random.Random) -> set[int]:
    """Submit jobs until so many wait or run; every third stays for some rounds."""
    jobs: set[int] = set()
    for _ in range(_WAITS - len(live(cluster))):
        is_long = dice.random() < 1 / 3
        seconds = 60.0 if is_long else dice.uniform(0.5, 6)
        options = [f"--gres=shard:{dice.choice(_SHARDS)}", "--output=/dev/null"]
        options.append(f"--job-name={'long' if is_long else 'short'}")
        jobs.add(cluster.sbatch(f"exec sleep {seconds:.1f}", *options))
    return jobs


def state(cluster: Cluster, job: int) -> str | None:
    """Return the state of a job; None if it is unknown.

    slurmctld writes its state every few seconds, so that a killed one forgets the latest jobs.
    """
    words = ("scontrol", "show", "job", "--oneliner", str(job))
    shown = cluster.run(*words, user="root", check=False).stdout
    return next((it[9:] for it in shown.split() if it.startswith("JobState=")), None)


def one_round(cluster: Cluster, dice: random.Random) -> Round:
    """Kill some daemons, start them again, and wait until leases and jobs are the same."""
    time.sleep(dice.uniform(0, 1.5))
    killed = dice.sample(list(victims(cluster, dice)), dice.choice((1, 1, 2, 3)))
    for _, kill, _ in killed:
        kill()
    time.sleep(dice.uniform(0, 4))
    for _, _, start in killed:
        start()
    began = time.monotonic()
    violations: Sequence[str] = ["not looked yet"]
    while violations and time.monotonic() - began < _SETTLED_WITHIN_S:
        time.sleep(0.2)
        violations = differences(cluster)
    return Round([name for name, _, _ in killed], time.monotonic() - began, violations)


def victims(
    cluster: Cluster, dice: random.Random
) -> Sequence[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Return a daemon of each kind: what it is, how to kill it, and how to start it again."""
    of_slurm, of_gpulease = dice.choices(list(cluster.nodes.values()), k=2)
    return (
        ("slurmctld", cluster.kill_controller, cluster.start_controller),
        (f"slurmd of {of_slurm.name}", of_slurm.kill_slurmd, of_slurm.start_slurmd),
        (f"gpuleased of {of_gpulease.name}", of_gpulease.kill_daemon, of_gpulease.start_daemon),
    )


def differences(cluster: Cluster) -> Sequence[str]:
    """Return leases without a job, jobs without a lease, and GPUs with too many leases."""
    wrong: list[str] = []
    try:
        held = {name: set(leases(node)) for name, node in cluster.nodes.items()}
        for node in cluster.nodes.values():
            wrong += [f"{node.name}: {it}" for it in promised_twice(node)]
    except GpuleaseError as error:
        return [str(error)]
    running, ending = on_nodes(cluster, "RUNNING"), on_nodes(cluster, "COMPLETING")
    for name in cluster.nodes:
        has, may = running.get(name, set()), ending.get(name, set())
        wrong += [f"{name}: lease without job {job}" for job in held[name] - has - may]
        # A job may end while both daemons of Slurm are dead: slurmctld has it as running for long.
        missing = [job for job in has - held[name] if has_step(cluster, name, job)]
        wrong += [f"{name}: job {job} without lease" for job in missing]
    return wrong


def has_step(cluster: Cluster, node: str, job: int) -> bool:
    """Return whether a slurmstepd of a job runs on a node."""
    titles = cluster.run(
        "sh", "-c", "cat /proc/[0-9]*/cmdline", user="root", node=node, check=False
    )
    return f"slurmstepd: [{job}." in titles.stdout


def promised_twice(node: Node) -> list[str]:
    return [it for gpu, held in gpus_in(node.client().status()) for it in over_promised(gpu, held)]


def on_nodes(cluster: Cluster, state: str) -> dict[str, set[int]]:
    """Return the jobs in a state on each node."""
    words = ("squeue", "--noheader", f"--states={state}", "--format=%N %A")
    found: dict[str, set[int]] = {}
    for line in cluster.run(*words, user="root").stdout.splitlines():
        node, _, job = line.partition(" ")
        found.setdefault(node, set()).add(int(job))
    return found


def live(cluster: Cluster) -> Sequence[str]:
    """Return the jobs that wait or run."""
    listed = cluster.run("squeue", "--noheader", f"--states={_LIVE}", "--format=%A", user="root")
    return listed.stdout.split()
