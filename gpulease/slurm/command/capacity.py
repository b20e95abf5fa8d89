"""What the nodes of the cluster offer at most: by Slurm's counts, and by what the nodes publish."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpulease.record import record
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.node_summary import NodeSummary, decode
from gpulease.slurm.records import parse_records
from gpulease.slurm.shards import DEFAULT_SHARD, shards_of_gpu

_GRES = re.compile(r"(?:^|,)(gpu|shard)(?::([^:,()]*[^:,()\d][^:,()]*))?(?::(\d+))?(?=[,(]|$)")
"""Such as gpu:2, gpu:a100:2(S:0-1) or shard:192."""


@record(frozen=True)
class Capacity:
    """All nodes together, those that are down included: jobs can wait for them."""

    shard: int = DEFAULT_SHARD
    """Bytes of one shard."""
    sizes: frozenset[int] = frozenset()
    """How many shards GPUs have."""
    gpus: int = 0
    """GPUs of the node that has most."""
    learnt: Sequence[Mapping[str, int]] = ()
    whole: int | None = None
    """How many shards every GPU has, if Slurm counts as many for each of them."""

    @property
    def largest(self) -> int:
        """Bytes of the largest GPU."""
        return max(self.sizes, default=0) * self.shard


def read_capacity(shard: int | None) -> Capacity:
    """Ask Slurm; `shard` is that of the settings here, if they have one.

    Raises:
        SlurmFailed: it does not answer.
    """
    return capacity_of(parse_records(run_slurm(["scontrol", "show", "node", "-o"])), shard)


def capacity_of(nodes: Iterable[Mapping[str, str]], shard: int | None) -> Capacity:
    """Return what nodes, as scontrol shows them, offer."""
    known = [(_counts(node.get("Gres", "")), decode(node.get("Extra"))) for node in nodes]
    summaries = [summary for _, summary in known if summary is not None]
    size = shard or next((each.shard for each in summaries), DEFAULT_SHARD)
    sizes = frozenset(shards for node in known for shards in _sizes(*node, size) if shards)
    return Capacity(
        shard=size,
        sizes=sizes,
        whole=_whole(sizes, [counts for counts, _ in known]),
        gpus=max((_total(counts, "gpu") for counts, _ in known), default=0),
        learnt=[each.learnt for each in summaries if each.learnt],
    )


_Counts = Counter[tuple[str, str]]


def _counts(gres: str) -> _Counts:
    """Return the counts of GPUs and shards by type."""
    counts = _Counts()
    for name, kind, count in _GRES.findall(gres):
        counts[name, kind] += int(count or 1)
    return counts


def _total(counts: _Counts, name: str) -> int:
    return sum(count for (each, _), count in counts.items() if each == name)


def _whole(sizes: Collection[int], nodes: Iterable[_Counts]) -> int | None:
    if len(sizes) != 1:
        return None
    (whole,) = sizes
    is_even = all(_total(node, "shard") == whole * _total(node, "gpu") for node in nodes)
    return whole if is_even else None


def _sizes(counts: _Counts, summary: NodeSummary | None, shard: int) -> list[int]:
    """Return the shards of each kind of GPU on a node.

    Slurm divides the shards of a node evenly over its GPUs if they are of one type, or if each type
    has shards; otherwise the node itself knows, and without it only the sum is known.
    """
    gpus = {kind: count for (name, kind), count in counts.items() if name == "gpu"}
    shards = _total(counts, "shard")
    if not gpus or not shards:
        return []
    if len(gpus) == 1:
        return [shards // _total(counts, "gpu")]
    if summary is None:
        return [shards]
    return [
        shards_of_gpu(gpu.allocatable, shard)
        for gpu in summary.gpus
        if gpu.allocatable is not None and not gpu.local
    ]
