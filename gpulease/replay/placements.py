"""The placement policies of a replay besides the daemon's own, to compare with it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpulease.domain.lease import Claim
from gpulease.domain.rooms import Room, Score, best_fit
from gpulease.replay.trace import TraceJob

_TYPICAL = 0.95
"""The most frequent sizes up to this part of the jobs are typical, as in the paper below."""
_TIE_BREAK = 1e-6


def placement_named(name: str, jobs: Iterable[TraceJob]) -> Score:
    """Return the placement policy `best`, `spread` or `fgd`; the last depends on the jobs."""
    if name == "fgd":
        return FragmentationGradient(_typical(Counter(job.memory for job in jobs)))
    return spread if name == "spread" else best_fit


def spread(claim: Claim, gpu: Room) -> float:
    """Prefer the GPU with the most headroom left."""
    return -best_fit(claim, gpu)


@dataclass(frozen=True, slots=True)
class FragmentationGradient:
    """Prefers the GPU on which the least memory becomes useless for typical jobs.

    Q. Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation
    Gradient Descent", USENIX ATC 2023, with GPUs in the place of nodes. Among equals, best fit.
    """

    typical: Mapping[int, float]
    """How frequent each size is, in bytes on a GPU."""

    def __call__(self, claim: Claim, gpu: Room) -> float:
        """Return the score of a GPU for a claim."""
        free = gpu.free
        left = free - claim.memory_on(gpu.allocatable)
        gradient = self._useless(left) - self._useless(free)
        return _TIE_BREAK * best_fit(claim, gpu) - gradient

    def _useless(self, free: int) -> float:
        return free * sum(part for size, part in self.typical.items() if size > free)


def _typical(sizes: Counter[int]) -> dict[int, float]:
    total, counted = sizes.total(), 0
    found: dict[int, float] = {}
    for size, count in sizes.most_common():
        if counted >= _TYPICAL * total:
            break
        found[size] = count / total
        counted += count
    return found
