"""Clusters with gpulease's hook in Slurm, and the leases on their nodes."""

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gpulease.setup
from gpulease.errors import GpuleaseError
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import StatusView

from .cluster import Cluster, running
from .node import Node
from .slurm_files import SHARD, Hooks, NodeSpec, Settings

CONFIG = """
cluster = "slurm"
grace = "2s"
overuse_grace = "1s"
overuse_tolerance = "64M"
[slurm]
publish_every = "1s"
"""
# A job whose prolog fails is queued again, and not held.
_SLURM_LINES = (
    "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,nohold_on_prolog_fail"
)
HOOK = "gpulease-hook"
_SAMPLE_EVERY_S = 0.1

WORK = """
import sys, time
held = b"x" * (int(sys.argv[1]) << 20)
time.sleep(float(sys.argv[2]))
"""
"""A program that holds so many MiB for so many seconds."""


@contextmanager
def leasing(
    nodes: Sequence[str] = ("n1", "n2", "n3"), gpus: str = "2x24G", wait_s: int = 20
) -> Iterator[Cluster]:
    """Yield a cluster whose prologs ask for leases; `wait_s`: how long for an absent daemon."""
    hook = (Path(gpulease.setup.__path__[0]) / "slurm_hook.pl").read_text()
    hook = hook.replace("$WAIT_S = 20;", f"$WAIT_S = {wait_s};")
    path = f"/etc/slurm/{HOOK}"
    specs = [NodeSpec(name, gpus, settings=CONFIG) for name in nodes]
    settings = Settings(Hooks(path, path, path), slurm_lines=_SLURM_LINES)
    with running(specs, settings, {HOOK: hook, "work.py": WORK}) as made:
        yield made


def leases(node: Node) -> dict[int, JobView]:
    """Return the leases on a node, by their jobs' numbers in Slurm."""
    return leases_in(node.client().status())


def leases_in(status: StatusView) -> dict[int, JobView]:
    return {job.slurm_job: job for job in status.jobs if job.slurm_job is not None and job.leases}


def where(cluster: Cluster, job: int) -> list[str]:
    """Return the nodes that hold a lease for a job."""
    return [name for name, node in cluster.nodes.items() if job in leases(node)]


def run_hook(
    cluster: Cluster, node: str, user: str, context: str, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the hook on a node by hand, as Slurm runs it in a context."""
    given = {"SLURM_SCRIPT_CONTEXT": context, "SLURMD_NODENAME": node, **variables}
    return cluster.run(f"/etc/slurm/{HOOK}", user=user, node=node, env=given, check=False)


@dataclass
class Samples:
    """What the daemons say of their GPUs, all the time, until the end of the block."""

    cluster: Cluster
    taken: int = 0
    violations: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Samples":
        for node in self.cluster.nodes.values():
            self._threads.append(threading.Thread(target=self._watch, args=(node,)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, node: Node) -> None:
        while not self._over.wait(_SAMPLE_EVERY_S):
            try:
                self.violations += over_promised(node.name, node.client().status())
            except GpuleaseError:
                continue  # it is being restarted
            self.taken += 1


def over_promised(node: str, status: StatusView) -> list[str]:
    """Return what is wrong with the leases on the GPUs of a node."""
    wrong: list[str] = []
    for gpu in status.gpus:
        held = {
            job.id: (lease.memory, job.claim.exclusive)
            for job in status.jobs
            for lease in job.leases
            if lease.gpu == gpu.uuid
        }
        total = sum(memory for memory, _ in held.values())
        if gpu.memory.allocatable is None or total > gpu.memory.allocatable:
            wrong.append(f"{node}: GPU {gpu.index} of {gpu.memory.allocatable}: {held}")
        if len(held) > 1 and any(exclusive for _, exclusive in held.values()):
            wrong.append(f"{node}: GPU {gpu.index} is exclusive and shared: {held}")
    return wrong


def gres(size: int) -> str:
    """Return the option for a lease of so many bytes."""
    return f"--gres=shard:{size // SHARD}"
