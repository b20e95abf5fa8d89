"""The placement policies that a replay can compare with the daemon's own."""

from collections import Counter
from collections.abc import Iterable

from gpulease.domain.fragmentation import Workload, fragmentation_gradient, typical
from gpulease.domain.lease import Claim
from gpulease.domain.rooms import Room, Score, best_fit
from gpulease.replay.trace import TraceJob


def placement_named(name: str, jobs: Iterable[TraceJob]) -> Score:
    """Return the placement policy `best`, `spread` or `fgd`; the last depends on the jobs."""
    if name == "fgd":
        sizes = typical(Counter(job.memory for job in jobs))
        return fragmentation_gradient(Workload.of(sizes.items()))
    return spread if name == "spread" else best_fit


def spread(claim: Claim, gpu: Room) -> float:
    """Prefer the GPU with the most headroom left."""
    return -best_fit(claim, gpu)
