"""What `status`, `list` and `show` know of a cluster, and how people read it.

The fields of these classes are those of the JSON.

The names and their meaning are those of the daemon's answers (`wire.jobs`, `wire.machine`), where
these have them. Sizes are bytes, instants are UTC, and null is unknown.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from gpulease.drawing.words import SUSPENDED, UNKNOWN, clean, clock, instant, sentence, size
from gpulease.slurm.annotations import ClusterNode, GpuSummary, NodeSummary, read_nodes, shard_size
from gpulease.slurm.records import requested as requested_in
from gpulease.units import counted
from gpulease.wire.text import spoken

_PERIODS = 6
"""A summary is old after so many periods: it is due after 4 at the latest."""
_BASE = re.compile(r"[A-Z_]+")
_FAR = timedelta(days=300)
"""Jobs without a time limit count as a year long in the predictions of Slurm."""


@dataclass
class ClaimView:
    """What a job asked for on each of its nodes."""

    memory: int | None
    """Bytes of one GPU; null for whole GPUs."""
    gpus: int
    exclusive: bool
    """Whether it asked for whole GPUs."""
    time_limit: float | None


@dataclass
class LeaseView:
    """The GPUs of a job on one node."""

    node: str
    gpu: str | None
    """Their indexes as in the status of the node, separated by commas."""
    memory: int | None


@dataclass
class ArrayWaitingView:
    """The waiting elements of an array, which are one entry of Slurm's queue."""

    indices: str
    """As Slurm writes them: "4-99%8" are at most 8 at once."""
    jobs: int


@dataclass
class JobView:
    """A job of Slurm that uses GPUs."""

    id: int
    """Slurm's JobId."""
    label: str
    """The id as people see it: 17, 17_3, or 17_[4-99] for the waiting elements of an array."""
    name: str
    user: str
    state: str
    """queued, active, releasing or ended, as for jobs of one machine."""
    outcome: str | None
    reason: str | None
    """Why it waits or why it ended, for people."""
    claim: ClaimView
    nodes: str | None
    """The nodes on which it runs or ran, as Slurm writes them."""
    leases: list[LeaseView]
    used: int | None
    """Bytes that it used at most on a GPU so far, as its node publishes it."""
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None
    expires_at: str | None
    expected_start_at: str | None
    begin_at: str | None
    exit_status: int | None
    """As in the daemon's answers: the exit code, 128 + signal, or 124 for the time limit."""
    suspended: bool
    array: int | None
    array_index: int | None
    array_waiting: ArrayWaitingView | None
    dependency: str | None
    comment: str | None
    """What gpulease noted with the job, such as why nodes refused it (AdminComment)."""
    requeued: int
    batch: bool
    """Whether it is a batch job (`gpulease run -d`, sbatch)."""
    partition: str
    slurm_state: str
    slurm_reason: str | None


@dataclass
class MemoryView:
    """The memory of one GPU."""

    total: int | None
    allocatable: int | None
    leased: int | None
    used: int | None
    unmanaged: int | None
    committed: int | None
    headroom: int | None
    """What can be leased now; null if the GPU grants nothing or its state is unknown."""


@dataclass
class GpuView:
    """A GPU of a node."""

    index: int
    uuid: str
    name: str
    state: str
    """As in the status of the node; unknown if the summary of the node is old."""
    detail: str | None
    """Why it takes no leases."""
    local: bool
    """Whether it belongs to the local queue of the node, and not to Slurm."""
    memory: MemoryView


@dataclass
class NodeView:
    """A node of Slurm, with what its gpuleased has published last."""

    name: str
    state: str
    """As sinfo(1) names it: idle, mixed, allocated, down, drained, draining and others."""
    reason: str | None
    at: str | None
    """When the summary was published; null if there is none."""
    is_old: bool
    """Whether later summaries are missing, so that the GPUs are unknown."""
    version: str | None
    shard: int | None
    gpus: list[GpuView]


@dataclass
class StatusView:
    """The nodes with GPUs, the running jobs, and the first of those that wait."""

    at: str
    nodes: list[NodeView]
    jobs: list[JobView]
    waiting: int
    """Jobs that wait, elements of arrays included; `jobs` has the first."""
    own_waiting: int = 0
    """Those of the caller."""


@dataclass
class JobList:
    """The jobs of a listing."""

    jobs: list[JobView] = field(default_factory=list)
    total: int = 0


def requested(job: JobView) -> str:
    """Write what a job asked for: 4G, or 2 GPUs."""
    claim = job.claim
    if claim.exclusive:
        return counted(claim.gpus, "GPU")
    return size(claim.memory)


def outcome_of(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    if job.suspended:
        return SUSPENDED
    return spoken(job.outcome or job.state)


def nodes_of(job: JobView) -> str:
    """Write the nodes of a job."""
    return clean(job.nodes or ("" if job.state in ("queued", "ended") else UNKNOWN))


def gpus_of(job: JobView) -> str:
    """Write the indexes of the GPUs of a job, with the node where there are several."""
    if len(job.leases) == 1:
        return job.leases[0].gpu or UNKNOWN
    known = [f"{clean(lease.node)}:{lease.gpu}" for lease in job.leases if lease.gpu]
    return " ".join(known) or UNKNOWN


def place_of(job: JobView) -> int:
    """Return how many places in the queue a job takes."""
    return 1 if job.array_waiting is None else job.array_waiting.jobs


def expected(job: JobView, now: datetime) -> str:
    """Write when Slurm expects a job to start."""
    at = job.expected_start_at
    return UNKNOWN if at is None or instant(at) - now > _FAR else clock(at, now)


def reason_of(job: JobView, now: datetime) -> str | None:
    """Write why a job waits or ended."""
    begins = f"not before {clock(job.begin_at, now)}" if job.begin_at else None
    parts = [begins, sentence(job.reason) if job.reason else None]
    return "; ".join(filter(None, parts)) or None


def views_of(nodes: Sequence[ClusterNode], now: datetime) -> list[NodeView]:
    """Return the nodes with GPUs."""
    return [
        _node(each.fields, each.summary, now)
        for each in nodes
        if "NodeName" in each.fields and (requested_in(each.fields.get("Gres")) or each.summary)
    ]


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
