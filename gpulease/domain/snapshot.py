"""What one scheduling decision depends on, and the ledgers of the GPUs that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpulease.domain.calendar import Occurrence
from gpulease.domain.eligibility import Block
from gpulease.domain.gpu import (
    GpuMemory,
    GpuReading,
    GpuUuid,
    JobId,
    LedgerEntry,
    UnmanagedBefore,
    build_ledger,
)
from gpulease.domain.host_memory import DEFAULT_HOST_POLICY, HostPolicy, HostReading
from gpulease.domain.job import Job
from gpulease.domain.limits import RecentUse, UserLimits
from gpulease.domain.past_jobs import PastUse, RunTimes
from gpulease.domain.queue import Queue
from gpulease.domain.queue_options import QueuePolicy

NOTHING_KNOWN = RunTimes()
UNUSED = PastUse(1.0)
DEFAULT_POLICY = QueuePolicy()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a decision depends on."""

    jobs: Sequence[Job]
    """Every job that waits or holds memory."""
    readings: Sequence[GpuReading]
    at: datetime
    jobs_by_pid: Mapping[int, JobId] = field(default_factory=dict)
    """The job of each process on a GPU."""
    margin: int = 0
    """Bytes of each GPU that are never leased."""
    drained: Mapping[GpuUuid, str] = field(default_factory=dict)
    mps_servers: frozenset[int] = frozenset()
    """The pids of MPS servers; the driver may count memory of jobs as theirs."""
    queue: Queue | None = None
    """The index of the jobs that hold memory or may start; None: all of `jobs`."""
    history: RunTimes = NOTHING_KNOWN
    use: PastUse = UNUSED
    """The use of jobs that have ended."""
    usual_wait_s: float = 0.0
    """The 90th percentile of recent waits, in seconds."""
    policy: QueuePolicy = DEFAULT_POLICY
    gpus: Sequence[GpuMemory] | None = None
    """The ledgers, if they are known already."""
    promised: Mapping[JobId, frozenset[GpuUuid]] = field(default_factory=dict)
    """The jobs that others make way for and their GPUs, as of the plan before."""
    blocked: Mapping[JobId, Block] | None = None
    """The waiting jobs that are not in `queue`, if it is given: they may not start now."""
    limits: Mapping[int, UserLimits] = field(default_factory=dict)
    """By uid; users who are not here have no limits."""
    recent_use: Mapping[int, RecentUse] = field(default_factory=dict)
    """By uid: the use of leases that have ended."""
    unmanaged: Mapping[GpuUuid, UnmanagedBefore] = field(default_factory=dict)
    """What was unmanaged before jobs whose use is unknown."""
    windows: Sequence[Occurrence] = ()
    """The current or next time of each window."""
    host: HostReading | None = None
    """The RAM and the cores of the server; None: unknown."""
    host_policy: HostPolicy = DEFAULT_HOST_POLICY


def ledgers(snapshot: Snapshot) -> tuple[GpuMemory, ...]:
    """Return the ledger of every GPU."""
    if snapshot.gpus is not None:
        return tuple(snapshot.gpus)
    drained = snapshot.drained
    entries: dict[GpuUuid, list[LedgerEntry]] = {}
    slurm: dict[JobId, int] = {}
    labels: dict[JobId, str] = {}
    for job in snapshot.jobs:
        if job.holds_memory:
            if job.slurm is not None:
                slurm[job.id] = job.slurm.id
            if job.queue.array is not None:
                labels[job.id] = job.label
            for lease in job.leases:
                entries.setdefault(lease.gpu, []).append(job.ledger_entry(lease))
    return tuple(
        build_ledger(
            reading,
            entries.get(reading.uuid, ()),
            snapshot.jobs_by_pid,
            snapshot.margin,
            # A drain of a GPU holds for its MIG devices.
            drained.get(reading.uuid) or (reading.parent and drained.get(reading.parent)),
            snapshot.mps_servers,
            slurm,
            labels,
            snapshot.unmanaged.get(reading.uuid),
        )
        for reading in snapshot.readings
    )


def capacity(gpus: Sequence[GpuMemory]) -> int:
    """Return the allocatable bytes of the largest GPU."""
    return max((gpu.allocatable or 0 for gpu in gpus), default=0)
