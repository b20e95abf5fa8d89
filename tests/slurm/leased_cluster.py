"""Clusters with gpulease's hook in Slurm, and the leases on their nodes."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gpulease.errors import GpuleaseError
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView, StatusView

from .cluster import Cluster, running
from .node import Node
from .slurm_files import NodeSpec, Settings

CONFIG = """
cluster = "slurm"
grace = "2s"
overuse_grace = "1s"
overuse_tolerance = "64M"
[slurm]
publish_every = "1s"
"""
_SAMPLE_EVERY_S = 0.1

WORK = """
import sys, time
held = b"x" * (int(sys.argv[1]) << 20)
time.sleep(float(sys.argv[2]))
"""
"""A program that holds so many MiB for so many seconds."""


@contextmanager
def leasing(nodes: Sequence[str] = ("n1", "n2", "n3"), **settings: Any) -> Iterator[Cluster]:
    """Yield a cluster whose prologs ask for leases; `settings` are those of `Settings`."""
    specs = [NodeSpec(name, settings=CONFIG) for name in nodes]
    with running(specs, Settings(**settings), {"work.py": WORK}) as made:
        yield made


def leases(node: Node) -> dict[int, JobView]:
    """Return the leases on a node, by their jobs' numbers in Slurm."""
    return leases_in(node.client().status())


def leases_in(status: StatusView) -> dict[int, JobView]:
    return {job.slurm_job: job for job in status.jobs if job.slurm_job is not None and job.leases}


def where(cluster: Cluster, job: int) -> list[str]:
    """Return the nodes that hold a lease for a job."""
    return [name for name, node in cluster.nodes.items() if job in leases(node)]


@dataclass
class Samples:
    """What the daemons say of their GPUs, all the time, until the end of the block."""

    cluster: Cluster
    violations: list[str] = field(default_factory=list)
    neighbours: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The jobs seen on the GPU of each job, by their numbers in Slurm."""
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
            with suppress(GpuleaseError):  # it may be restarting
                for gpu, held in gpus_in(node.client().status()):
                    self._add(node.name, gpu, held)

    def _add(self, node: str, gpu: GpuView, held: Mapping[int, tuple[int, bool]]) -> None:
        self.violations += [f"{node}: {wrong}" for wrong in over_promised(gpu, held)]
        for job in held:
            self.neighbours[job] |= held.keys() - {job}


def gpus_in(status: StatusView) -> Iterator[tuple[GpuView, Mapping[int, tuple[int, bool]]]]:
    """Yield each GPU with its leases: by Slurm's number the bytes, and whether it is exclusive."""
    for gpu in status.gpus:
        yield (
            gpu,
            {
                number: (lease.memory, job.claim.exclusive)
                for number, job in leases_in(status).items()
                for lease in job.leases
                if lease.gpu == gpu.uuid
            },
        )


def over_promised(gpu: GpuView, held: Mapping[int, tuple[int, bool]]) -> Iterator[str]:
    """Yield what is wrong with the leases on a GPU."""
    if sum(memory for memory, _ in held.values()) > (gpu.memory.allocatable or 0):
        yield f"GPU {gpu.index} has {gpu.memory.allocatable} bytes for {held}"
    if len(held) > 1 and any(is_exclusive for _, is_exclusive in held.values()):
        yield f"GPU {gpu.index} is exclusive and shared: {held}"
