"""Shards, the unit in which Slurm counts memory of GPUs (gres.conf(5), "sharding").

All shards of a job are on one GPU. Slurm counts them and limits nothing.
"""

from gpulease.units import MIB

DEFAULT_SHARD = 256 * MIB
"""Bytes of one shard."""


def shards_for(memory: int, shard: int) -> int:
    """Return how many shards of `shard` bytes hold `memory` bytes."""
    return max(1, -(-memory // shard))


def shards_of_gpu(allocatable: int, shard: int) -> int:
    """Return how many shards of `shard` bytes a GPU with `allocatable` bytes has."""
    return allocatable // shard
