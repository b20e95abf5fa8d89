"""What the daemon of a node publishes, and any node reads through Slurm.

It is JSON in the field Extra of the node (`scontrol update nodename=n1 extra=...`). It contains no
space, since scontrol prints fields separated by spaces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1


@record(frozen=True)
class GpuSummary:
    """One GPU of a node. Sizes are bytes; null is unknown."""

    index: int
    uuid: str
    name: str
    state: str
    """available, drained, unreadable or lost, as in `status`."""
    total: int | None = None
    allocatable: int | None = None
    leased: int | None = None
    used: int | None = None
    unmanaged: int | None = None
    local: bool = False
    """It belongs to the local queue, and Slurm does not know it."""
    detail: str | None = None
    """Why it takes no leases."""


@record(frozen=True)
class NodeSummary:
    """The GPUs of a node at one moment."""

    at: float
    """Seconds since the epoch, on the node's clock."""
    shard: int
    """Bytes of one shard."""
    gpus: tuple[GpuSummary, ...]
    version: str = ""
    """Of gpulease."""
    publish_every: float = 15.0
    """Seconds after which the next one is due, if anything has changed or not."""
    learnt: Mapping[str, int] = MappingProxyType({})
    """Bytes that jobs needed at their peak, by the digest of user and command."""


def encode(summary: NodeSummary) -> str:
    """Return a summary as text without spaces."""
    gpus = [vars(gpu) for gpu in summary.gpus]
    fields = {"v": VERSION, **vars(summary), "gpus": gpus, "learnt": dict(summary.learnt)}
    text = json.dumps(fields, separators=(",", ":"))
    return text.replace(" ", "\\u0020")


def decode(text: str | None) -> NodeSummary | None:
    """Return the summary in the field Extra of a node; None if gpulease did not write it.

    Fields that this version does not know are ignored.
    """
    try:
        read: dict[str, Any] = json.loads(text or "")
        gpus = tuple(GpuSummary(**_known(GpuSummary, each)) for each in read.pop("gpus"))
        return NodeSummary(**{**_known(NodeSummary, read), "gpus": gpus})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _known(kind: type, read: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read[name] for name in kind.__annotations__ if name in read}
