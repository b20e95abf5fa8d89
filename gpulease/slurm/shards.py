"""Shards, the unit in which Slurm counts memory of GPUs (gres.conf(5), "sharding").

All shards of a job are on one GPU. Slurm counts them and limits nothing.
"""

import re
from collections import Counter

from gpulease.record import record
from gpulease.units import MIB

DEFAULT_SHARD = 256 * MIB
"""Bytes of one shard."""
_UNITS = {"K": 1024, "M": 1024**2}
_OF_NODE = re.compile(r"(?:^|,)(gpu|shard)(?::([^:,()]*[^:,()\d][^:,()]*))?(?::(\d+))?(?=[,(]|$)")
"""Such as gpu:2, gpu:a100:2(S:0-1) or shard:192."""


def gres_of_node(gres: str) -> Counter[tuple[str, str]]:
    """Return the counts in the Gres of a node by gpu or shard and type, in its order."""
    counts = Counter[tuple[str, str]]()
    for name, kind, count in _OF_NODE.findall(gres):
        counts[name, kind] += int(count or 1)
    return counts


def shards_for(memory: int, shard: int) -> int:
    """Return how many shards of `shard` bytes hold `memory` bytes."""
    return max(1, -(-memory // shard))


def shards_of_gpu(allocatable: int, shard: int) -> int:
    """Return how many shards of `shard` bytes a GPU with `allocatable` bytes has."""
    return allocatable // shard


@record(frozen=True)
class Requested:
    """The GPUs that a job asks for on each node: whole ones, or shards of one."""

    gpus: int = 0
    shards: int = 0

    def __bool__(self) -> bool:
        return bool(self.gpus or self.shards)


def requested(*resources: str | None) -> Requested:
    """Read generic resources, such as "gres:shard:16", "gres/gpu:a100:2", "gres/gpu=1" or "gpu"."""
    counts = {"gpu": 0, "shard": 0}
    for each in ",".join(filter(None, resources)).split(","):
        plain = each.partition("(")[0].replace("/", ":").replace("=", ":")
        name, *rest = plain.removeprefix("gres:").split(":")
        if name in counts:
            counts[name] += _count(rest[-1] if rest else "")
    return Requested(counts["gpu"], counts["shard"])


def _count(text: str) -> int:
    """Return a count, such as 16 or 1K; 1 for the type of a GPU without a count."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not (number.isascii() and number.isdecimal()):
        return 1
    return int(number) * _UNITS.get(unit, 1)
