"""The nodes of the cluster and their GPUs, as Slurm and the daemons there publish them."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from gpulease.config import SYSTEM_CONFIG, Settings, read_settings
from gpulease.errors import BadConfiguration
from gpulease.slurm.command.views import GpuView, MemoryView, NodeView
from gpulease.slurm.node_summary import ClusterNode, GpuSummary, NodeSummary, read_nodes
from gpulease.slurm.shards import DEFAULT_SHARD, requested

_PERIODS = 6
"""A summary is old after so many periods: it is due after 4 at the latest."""
_BASE = re.compile(r"[A-Z_]+")


def views_of(nodes: Sequence[ClusterNode], now: datetime) -> list[NodeView]:
    """Return the nodes with GPUs."""
    return [
        _node(each.fields, each.summary, now)
        for each in nodes
        if "NodeName" in each.fields and (requested(each.fields.get("Gres")) or each.summary)
    ]


def shard_size(nodes: Sequence[ClusterNode]) -> int:
    """Return the bytes of one shard: as nodes publish it, or else as the settings here say."""
    for node in nodes:
        if node.summary is not None:
            return node.summary.shard
    try:
        settings = read_settings(SYSTEM_CONFIG if SYSTEM_CONFIG.is_file() else None, Settings())
    except BadConfiguration:  # readable by admins only, or theirs to correct
        return DEFAULT_SHARD
    return int(settings.slurm.get("shard", DEFAULT_SHARD))


def shard_and_used() -> tuple[int, Mapping[str, int]]:
    """Return the bytes of one shard, and those that jobs used at most on a GPU, by number."""
    nodes = read_nodes()
    used: dict[str, int] = {}
    for node in nodes:
        for job, most in () if node.summary is None else node.summary.used.items():
            used[job] = max(most, used.get(job, 0))
    return shard_size(nodes), used


def _node(fields: Mapping[str, str], summary: NodeSummary | None, now: datetime) -> NodeView:
    is_old = summary is not None and now.timestamp() - summary.at > _PERIODS * summary.publish_every
    at = None if summary is None else datetime.fromtimestamp(summary.at, UTC)
    return NodeView(
        name=fields["NodeName"],
        state=_state(fields.get("State", "")),
        reason=fields.get("Reason"),
        at=None if at is None else f"{at:%Y-%m-%dT%H:%M:%SZ}",
        is_old=is_old,
        version=None if summary is None else summary.version,
        shard=None if summary is None else summary.shard,
        gpus=[] if summary is None else [_gpu(gpu, is_old=is_old) for gpu in summary.gpus],
    )


def _state(text: str) -> str:
    """Return one word for a state such as "MIXED+DRAIN" or "DOWN*"."""
    base, *flags = _BASE.findall(text) or ["unknown"]
    if "*" in text or "NOT_RESPONDING" in flags or base == "DOWN":
        return "down"
    if "DRAIN" in flags:
        return "drained" if base == "IDLE" else "draining"
    for flag in ("FAIL", "MAINTENANCE", "REBOOT_ISSUED", "POWERED_DOWN", "PLANNED", "RESERVED"):
        if flag in flags:
            return flag.lower().replace("_", " ")
    return str(base).lower()


def _gpu(gpu: GpuSummary, *, is_old: bool) -> GpuView:
    if is_old:
        memory = MemoryView(gpu.total, gpu.allocatable, *[None] * 5)
        return GpuView(gpu.index, gpu.uuid, gpu.name, "unknown", gpu.detail, gpu.local, memory)
    committed, headroom = gpu.leased, None
    if gpu.leased is not None and gpu.used is not None and gpu.unmanaged is not None:
        committed = max(gpu.leased, gpu.used - gpu.unmanaged)
    # What is unknown is not free.
    if gpu.allocatable is not None and committed is not None and gpu.unmanaged is not None:
        headroom = max(0, gpu.allocatable - committed - gpu.unmanaged)
    memory = MemoryView(
        gpu.total, gpu.allocatable, gpu.leased, gpu.used, gpu.unmanaged, committed,
        headroom if gpu.state == "available" else None,
    )  # fmt: skip
    return GpuView(gpu.index, gpu.uuid, gpu.name, gpu.state, gpu.detail, gpu.local, memory)
