"""Fragmentation gradient descent: a placement policy that keeps free memory useful.

A fragment is free memory of a GPU that a typical job cannot use, because it asks for more. The
policy prefers the GPU where a placement adds the least expected fragments. Source: Weng et al.,
"Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent",
USENIX ATC 2023.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, TypeVar

from gpulease.domain.lease import Claim
from gpulease.domain.planned_gpu import PlannedGpu, Score

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
    """Return the placement policy for `workload`; equal scores go to the best fit."""

    def score(claim: Claim, gpu: PlannedGpu) -> float:
        after = 0 if claim.exclusive else gpu.free - claim.memory_on(gpu.allocatable)
        fewer = workload.fragments(gpu.free) - workload.fragments(after)
        return points(fewer / gpu.allocatable) - after / (gpu.allocatable + 1)

    return score
