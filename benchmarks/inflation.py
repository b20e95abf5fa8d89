"""How much of a cluster can be leased before jobs stop fitting: `python -m benchmarks.inflation`.

G1 repeats the inflation experiment of Weng et al. (USENIX ATC 2023) on their trace: the pods
arrive in random order, with random pods appended, and none ends. The figure is the part of all GPU
memory that is leased when as much as the cluster has was asked for. G2 fills one server of 8 GPUs
with the same pods; there, best fit, which the product uses, equals fragmentation gradient descent.
GPULEASE_TRACES names the directory with the traces `openb_*.csv.gz` and the published figures
`fgd_published_openb_default.csv`.
"""

import argparse
import csv
import gzip
import math
import os
import random
import statistics
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from gpulease.domain.choice import PlannedGpu, Score, best_fit
from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid, JobId, build_ledger
from gpulease.domain.lease import Claim
from gpulease.domain.placement import Placement, granted, place

WHOLE = 1000
"""The memory of one GPU, in the unit of the trace."""
ARRIVALS = 1.3
NEVER = WHOLE + 1
"""The size that stands for a job which a node cannot run at all."""
GOALS = {("G1", "fgd"): 95.0, ("G2", "best fit"): 88.5}
POLICIES = {"fgd": "06-FGD", "best fit": "05-BestFit", "random": "01-Random"}
"""And what the published figures call them."""
SERVER_POLICIES = ("fgd", "best fit", "random", "spread")


Shape = TypeVar("Shape", bound=Hashable)

TYPICAL_PART = 0.95
"""The most frequent shapes that make up this part of the jobs are the typical ones."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The memory that typical jobs ask for on each GPU, and how many of them ask for it."""

    sizes: tuple[int, ...]
    """In ascending order."""
    parts_above: tuple[float, ...]
    """Element n: the part of the jobs that ask for more than the first n sizes."""

    @classmethod
    def of(cls, parts: Iterable[tuple[int, float]]) -> Self:
        """Build a workload from pairs of a size and the part of the jobs that ask for it."""
        ordered = sorted(parts)
        above = [*accumulate((part for _, part in reversed(ordered)), initial=0.0)]
        return cls(tuple(size for size, _ in ordered), tuple(reversed(above)))

    def fragments(self, free: int) -> float:
        """Return how many of the `free` bytes of a GPU the average job cannot use."""
        return free * self.parts_above[bisect_right(self.sizes, free)]


def typical(counts: Mapping[Shape, int]) -> dict[Shape, float]:
    """Return the typical shapes of jobs, and the part of all typical jobs that has each."""
    enough, seen = TYPICAL_PART * sum(counts.values()), 0
    chosen: dict[Shape, int] = {}
    for shape, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        if seen >= enough:
            break
        chosen[shape] = count
        seen += count
    return {shape: count / seen for shape, count in chosen.items()}


def points(fewer: float) -> int:
    """Return the score, 0 to 100, of a placement that leaves `fewer` GPUs of fragments.

    Whole points: differences that do not matter are ties, and another rule decides these.
    """
    return int(100 / (1 + math.exp(-fewer)))


def fragmentation_gradient(workload: Workload) -> Score:
    """Return the placement policy for `workload`; equal scores go to the best fit.

    A fragment is free memory of a GPU that a typical job cannot use, because it asks for more. The
    policy prefers the GPU where a placement adds the least expected fragments. Source: Weng et al.,
    "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent",
    USENIX ATC 2023.
    """

    def score(claim: Claim, gpu: PlannedGpu) -> float:
        after = 0 if claim.exclusive else gpu.free - claim.memory_on(gpu.allocatable)
        fewer = workload.fragments(gpu.free) - workload.fragments(after)
        return points(fewer / gpu.allocatable) - after / (gpu.allocatable + 1)

    return score


class Pod(NamedTuple):
    cpu: int
    ram: int
    gpus: int
    memory: int
    """On each of its GPUs."""


class Node(NamedTuple):
    """What is free on a node."""

    cpu: int
    ram: int
    gpus: tuple[int, ...]
    """In ascending order."""


Shape = tuple[int, int, int]
"""Processors, GPUs and memory of a pod: what fragments depend on."""
Choice = tuple[float, Node]
"""The score of a node for a pod, and the node after the placement."""
Rate = Callable[[Node, Pod], Choice]


def read(name: str) -> Iterator[dict[str, str]]:
    with gzip.open(Path(os.environ["GPULEASE_TRACES"]) / name, "rt") as file:
        yield from csv.DictReader(file)


def openb_pods() -> list[Pod]:
    columns = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    return [
        Pod(*(int(row[each]) for each in columns)) for row in read("openb_pod_list_default.csv.gz")
    ]


def openb_nodes() -> Counter[Node]:
    return Counter(
        Node(int(row["cpu_milli"]), int(row["memory_mib"]), (WHOLE,) * int(row["gpu"]))
        for row in read("openb_node_list_gpu_node.csv.gz")
    )


def published(policy: str) -> list[float]:
    path = Path(os.environ["GPULEASE_TRACES"]) / "fgd_published_openb_default.csv"
    with path.open() as file:
        return [float(row["a100"]) for row in csv.DictReader(file) if row["policy"] == policy]


def arrivals(pods: Sequence[Pod], capacity: int, chance: random.Random) -> list[Pod]:
    """Return the pods in random order, and random pods after them."""
    order = chance.sample(pods, len(pods))
    asked = sum(pod.gpus * pod.memory for pod in order)
    while asked < ARRIVALS * capacity:
        order.append(chance.choice(pods))
        asked += order[-1].gpus * order[-1].memory
    return order


def fits(node: Node, pod: Pod) -> bool:
    if node.cpu < pod.cpu or node.ram < pod.ram or len(node.gpus) < pod.gpus:
        return False
    return pod.gpus == 0 or node.gpus[-pod.gpus] >= pod.memory


def options(node: Node, pod: Pod) -> Iterator[tuple[int, ...]]:
    """Yield what could be free on the GPUs of a node after a placement there."""
    if pod.gpus != 1:
        left = len(node.gpus) - pod.gpus
        yield (*(free - pod.memory for free in node.gpus[left:]), *node.gpus[:left])
        return
    for free in dict.fromkeys(node.gpus):
        if free >= pod.memory:
            at = node.gpus.index(free)
            rest = (*node.gpus[:at], free - pod.memory, *node.gpus[at + 1 :])
            yield tuple(sorted(rest))


@dataclass(frozen=True, slots=True)
class Fragments:
    """The fragments of a node: those of its GPUs, for the pods that it has processors for."""

    shapes: Mapping[Shape, float]
    workloads: dict[tuple[float, ...], Workload]
    known: dict[tuple[int, tuple[int, ...]], float]

    def of(self, cpu: int, gpus: tuple[int, ...]) -> float:
        if (cpu, gpus) not in self.known:
            workload = self._workload(cpu, gpus)
            self.known[cpu, gpus] = sum(workload.fragments(free) for free in gpus) / WHOLE
        return self.known[cpu, gpus]

    def _workload(self, cpu: int, gpus: tuple[int, ...]) -> Workload:
        """Return the workload in which pods that the node cannot run ask for too much."""
        sizes = tuple(
            memory if self._runs(cpu, gpus, shape) else NEVER
            for shape in self.shapes
            for memory in shape[2:]
        )
        if sizes not in self.workloads:
            self.workloads[sizes] = Workload.of(zip(sizes, self.shapes.values(), strict=True))
        return self.workloads[sizes]

    @staticmethod
    def _runs(cpu: int, gpus: tuple[int, ...], shape: Shape) -> bool:
        least, count, memory = shape
        return cpu >= least and 0 < count <= len(gpus) and gpus[-count] >= memory


def rate_by_fragments(fragments: Fragments, node: Node, pod: Pod) -> Choice:
    """Rate a node by the gradient; the best fit decides between equal ones."""
    before, cpu = fragments.of(node.cpu, node.gpus), node.cpu - pod.cpu
    rated = [(points(before - fragments.of(cpu, gpus)), gpus) for gpus in options(node, pod)]
    score, gpus = min(rated, key=lambda pair: (-pair[0], pair[1]))
    return score + tightness(cpu, gpus), Node(cpu, node.ram - pod.ram, gpus)


def rate_by_tightness(node: Node, pod: Pod) -> Choice:
    cpu, gpus = node.cpu - pod.cpu, min(options(node, pod))
    return tightness(cpu, gpus), Node(cpu, node.ram - pod.ram, gpus)


def rate_equally(chance: random.Random, node: Node, pod: Pod) -> Choice:
    gpus = chance.choice([*options(node, pod)])
    return 0, Node(node.cpu - pod.cpu, node.ram - pod.ram, gpus)


def tightness(cpu: int, gpus: tuple[int, ...]) -> float:
    """Return a number below 1 that is the higher, the less is left of a node."""
    return 1 / (2 + cpu / 128_000 + sum(gpus) / (8 * WHOLE))


def inflate(nodes: Counter[Node], order: Sequence[Pod], rate: Rate, chance: random.Random) -> float:
    """Return the percentage of all GPU memory that is leased when all of it has been asked for."""
    capacity = sum(count * sum(node.gpus) for node, count in nodes.items())
    nodes, asked, leased = nodes.copy(), 0, 0
    scores: dict[tuple[Node, Pod], float] = {}
    for pod in order:
        asked += pod.gpus * pod.memory
        found = [node for node in nodes if fits(node, pod)]
        for node in found:
            if (node, pod) not in scores:
                scores[node, pod] = rate(node, pod)[0]
        if found:
            chosen = highest(nodes, found, [scores[node, pod] for node in found], chance)
            nodes[rate(chosen, pod)[1]] += 1
            nodes[chosen] -= 1
            if not nodes[chosen]:
                del nodes[chosen]
            leased += pod.gpus * pod.memory
        if asked >= capacity:
            break
    return 100 * leased / capacity


def highest(
    nodes: Counter[Node], found: Sequence[Node], scores: Sequence[float], chance: random.Random
) -> Node:
    """Return a node with the highest score; each of them is equally likely."""
    best = max(scores)
    equal = [node for node, score in zip(found, scores, strict=True) if score == best]
    return chance.choices(equal, [nodes[node] for node in equal])[0]


def inflation(policy: str, seed: int) -> float:
    """Return the result of one run of G1."""
    nodes, pods, chance = openb_nodes(), openb_pods(), random.Random(seed)
    order = arrivals(pods, sum(sum(node.gpus) * n for node, n in nodes.items()), chance)
    shapes = typical(Counter((pod.cpu, pod.gpus, pod.memory) for pod in pods))
    rates: dict[str, Rate] = {
        "fgd": partial(rate_by_fragments, Fragments(shapes, {}, {})),
        "best fit": rate_by_tightness,
        "random": partial(rate_equally, chance),
    }
    return inflate(nodes, order, rates[policy], chance)


def fill(pods: Sequence[Pod], score_of_next: Callable[[], Score]) -> float:
    """Return the percentage of a server with 8 GPUs that is leased when all was asked for."""
    gpus = [_empty_gpu(index) for index in range(8)]
    asked = leased = 0
    for number, pod in enumerate(pods):
        claim = Claim(pod.memory, pod.gpus)
        placement = place(claim, gpus, score_of_next())
        if isinstance(placement, Placement):
            leased += pod.gpus * pod.memory
            sizes = dict(placement.allocations)
            gpus = [
                granted(JobId(number), claim, sizes[gpu.uuid], gpu) if gpu.uuid in sizes else gpu
                for gpu in gpus
            ]
        asked += pod.gpus * pod.memory
        if asked >= 8 * WHOLE:
            break
    return 100 * leased / (8 * WHOLE)


def _empty_gpu(index: int) -> GpuMemory:
    reading = GpuReading(GpuUuid(f"GPU-{index}"), index, "", WHOLE, 0, 0, ())
    return build_ledger(reading, (), {})


def random_score(chance: random.Random) -> Score:
    drawn: dict[GpuUuid, float] = {}
    return lambda _claim, gpu: drawn.setdefault(gpu.uuid, chance.random())


def server(policy: str, runs: int) -> list[float]:
    """Return the results of so many runs of G2."""
    pods = [pod for pod in openb_pods() if pod.gpus]
    shapes = typical(Counter(pod.memory for pod in pods))
    chance = random.Random(runs)
    gradient = fragmentation_gradient(Workload.of(shapes.items()))
    scores: dict[str, Callable[[], Score]] = {
        "fgd": lambda: gradient,
        "best fit": lambda: best_fit,
        "random": lambda: random_score(chance),
        "spread": lambda: lambda _claim, gpu: gpu.free,
    }
    orders = (arrivals(pods, 8 * WHOLE, random.Random(seed)) for seed in range(runs))
    return [fill(order, scores[policy]) for order in orders]


def verdict(mean: float, error: float, goal: float) -> str:
    if mean >= goal:
        return "reached"
    return "not reached" + (", within twice the standard error" if mean + 2 * error >= goal else "")


def report(name: str, policy: str, results: Sequence[float]) -> str:
    """Return a line about one policy; only the default of G1 or G2 has a goal."""
    mean, spread = statistics.mean(results), statistics.stdev(results)
    line = f"  {policy:9}{mean:6.2f} % (sd {spread:.2f})"
    if name == "G1":
        there = published(POLICIES[policy])
        line += f"   published {statistics.mean(there):.2f} ({statistics.stdev(there):.2f})"
    if (name, policy) not in GOALS:
        return line
    goal, error = GOALS[name, policy], spread / math.sqrt(len(results))
    return (
        f"{line}   goal >= {goal:.1f} %, standard error {error:.2f}: {verdict(mean, error, goal)}"
    )


def run(seeds: int, runs: int) -> Iterator[str]:
    with ProcessPoolExecutor(2) as pool:
        yield f"G1: leased of 6212 GPUs when 100 % was asked for, {seeds} orders of arrival"
        for policy in POLICIES:
            results = pool.map(inflation, [policy] * seeds, range(42, 42 + seeds))
            yield report("G1", policy, list(results))
        yield f"G2: the same on one server of 8 GPUs, {runs} orders of arrival"
        filled = pool.map(server, SERVER_POLICIES, [runs] * len(SERVER_POLICIES))
        for policy, results in zip(SERVER_POLICIES, filled, strict=True):
            yield report("G2", policy, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="orders of arrival for G1")
    parser.add_argument("--runs", type=int, default=2000, help="orders of arrival for G2")
    asked = parser.parse_args()
    if "GPULEASE_TRACES" not in os.environ:
        sys.exit("cannot run: GPULEASE_TRACES does not name the directory with the traces")
    for line in run(max(2, asked.seeds), max(2, asked.runs)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
