"""The nodes of the cluster and their GPUs, as Slurm and the daemons there publish them."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from gpulease.config import SYSTEM_CONFIG, Settings, read_settings
from gpulease.errors import BadConfiguration
from gpulease.record import record
from gpulease.slurm.command.views import GpuView, MemoryView, NodeView
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.node_summary import GpuSummary, NodeSummary, decode
from gpulease.slurm.records import parse_record
from gpulease.slurm.shards import DEFAULT_SHARD, requested

_PERIODS = 6
"""A summary is old after so many periods: it is due after 4 at the latest."""
_REASON = re.compile(r" Reason=(.*?) \[[^@\[\]]+@[0-9T:-]+\]")
_BASE = re.compile(r"[A-Z_]+")


def read_nodes(now: datetime) -> list[NodeView]:
    """Return the nodes with GPUs."""
    return nodes_of(run_slurm(["scontrol", "show", "node", "--oneliner"]), now)


def nodes_of(shown: str, now: datetime) -> list[NodeView]:
    """Return the nodes with GPUs in the output of `scontrol --oneliner show node`."""
    found = [{**parse_record(line), **_reason(line)} for line in shown.split("\n") if line.strip()]
    return [
        _node(each, now)
        for each in found
        if "NodeName" in each and (requested(each.get("Gres")) or decode(each.get("Extra")))
    ]


def _reason(line: str) -> Mapping[str, str]:
    """Return the reason of the state of a node, which may contain what looks like a field."""
    found = _REASON.search(line)
    return {"Reason": found[1]} if found else {}


def shard_size(nodes: Sequence[NodeView] | None = None) -> int:
    """Return the bytes of one shard: as nodes publish it, or else as the settings here say."""
    known = read_nodes(datetime.now(UTC)) if nodes is None else nodes
    for node in known:
        if node.shard:
            return node.shard
    try:
        settings = read_settings(SYSTEM_CONFIG if SYSTEM_CONFIG.is_file() else None, Settings())
    except BadConfiguration:  # readable by admins only, or theirs to correct
        return DEFAULT_SHARD
    return int(settings.slurm.get("shard", DEFAULT_SHARD))


@record(frozen=True)
class Published:
    """What the nodes publish of jobs."""

    shard: int
    """Bytes of one shard."""
    used: Mapping[str, int]
    """Bytes that jobs used at most on a GPU so far, by number."""


def read_published() -> Published:
    """Return what the nodes publish of jobs."""
    shown = run_slurm(["scontrol", "show", "node", "--oneliner"])
    used: dict[str, int] = {}
    for line in filter(str.strip, shown.split("\n")):
        summary = decode(parse_record(line).get("Extra"))
        for job, most in () if summary is None else summary.used.items():
            used[job] = max(most, used.get(job, 0))
    return Published(shard_size(nodes_of(shown, datetime.now(UTC))), used)


def _node(fields: Mapping[str, str], now: datetime) -> NodeView:
    summary = decode(fields.get("Extra"))
    is_old = summary is not None and _is_old(summary, now)
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


def _is_old(summary: NodeSummary, now: datetime) -> bool:
    return now.timestamp() - summary.at > _PERIODS * summary.publish_every


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
    else:
        committed = _committed(gpu)
        memory = MemoryView(
            gpu.total, gpu.allocatable, gpu.leased, gpu.used, gpu.unmanaged, committed,
            _headroom(gpu, committed),
        )  # fmt: skip
    state = "unknown" if is_old else gpu.state
    return GpuView(gpu.index, gpu.uuid, gpu.name, state, gpu.detail, gpu.local, memory)


def _committed(gpu: GpuSummary) -> int | None:
    if gpu.leased is None or gpu.used is None or gpu.unmanaged is None:
        return gpu.leased
    return max(gpu.leased, gpu.used - gpu.unmanaged)


def _headroom(gpu: GpuSummary, committed: int | None) -> int | None:
    known = gpu.allocatable is not None and committed is not None and gpu.unmanaged is not None
    if gpu.state != "available" or not known:
        return None
    return max(0, (gpu.allocatable or 0) - (committed or 0) - (gpu.unmanaged or 0))
