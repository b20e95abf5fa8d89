"""One decision: who of those that wait is granted what, and why the others wait.

`plan` is a pure function of a snapshot. The daemon calls it on the machine as it is; a replay calls
it on a recorded workload.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid, JobId, LedgerEntry, build_ledger
from gpulease.domain.job import Job, wait_has_expired
from gpulease.domain.lease import Claim
from gpulease.domain.placement import (
    Obstacle,
    Placement,
    Refusal,
    Score,
    best_fit,
    find_obstacle,
    granted,
    place,
    reserved_for,
)
from gpulease.domain.queue import expected_start, in_order, reserves


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision depends on."""

    jobs: Sequence[Job]
    """Every job that waits or holds memory."""
    readings: Sequence[GpuReading]
    at: datetime
    jobs_by_pid: Mapping[int, JobId] = field(default_factory=dict)
    """Which job a process on a GPU belongs to."""
    margin: int = 0
    """Bytes of each GPU that are never leased."""
    drained: Mapping[GpuUuid, str] = field(default_factory=dict)
    mps_servers: frozenset[int] = frozenset()
    """The pids of MPS servers, on whose account the memory of jobs may stand."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a job waits, as of one plan."""

    refusal: Refusal
    expected_start_at: datetime | None = None
    reserved: frozenset[GpuUuid] = frozenset()
    """The GPUs that nobody who came later may have before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about the queue."""

    grants: tuple[tuple[JobId, Placement], ...]
    gives_up: tuple[JobId, ...]
    waiting: Mapping[JobId, WaitReason]
    """Those that were looked at. Who stands behind them waits for every GPU that they wait for."""
    gpus: tuple[GpuMemory, ...]
    """The ledgers after the grants."""
    reserved: Mapping[GpuUuid, JobId]
    """The GPUs that are kept for an earlier waiting job, and for which."""
    holders: tuple[JobId, ...] = ()
    """The jobs that hold memory after the grants."""

    @property
    def is_closed(self) -> bool:
        """Whether a job that comes now has to wait, whatever it asks for."""
        return len(self.reserved) == len(self.gpus)


def ledgers(snapshot: Snapshot) -> tuple[GpuMemory, ...]:
    """Draw up the ledger of every GPU."""
    holdings: dict[GpuUuid, list[LedgerEntry]] = {}
    for job in snapshot.jobs:
        if job.holds_memory:
            for lease in job.leases:
                holdings.setdefault(lease.gpu, []).append(job.ledger_entry(lease))
    return tuple(
        build_ledger(
            reading,
            holdings.get(reading.uuid, ()),
            snapshot.jobs_by_pid,
            snapshot.margin,
            _drained(reading, snapshot.drained),
            snapshot.mps_servers,
        )
        for reading in snapshot.readings
    )


def _drained(reading: GpuReading, drained: Mapping[GpuUuid, str]) -> str | None:
    """Return why nothing may be granted on a GPU, or on the GPU that it is a part of."""
    own = drained.get(reading.uuid)
    return own if own is not None or reading.parent is None else drained.get(reading.parent)


def plan(snapshot: Snapshot, score: Score = best_fit) -> Plan:
    """Decide who is granted what; never more than the headroom, never past who came first."""
    desk = _PlanningPass(snapshot, score)
    for job in in_order(job for job in snapshot.jobs if not job.holds_memory):
        if desk.has_open_gpus or wait_has_expired(job, snapshot.at):
            desk.consider(job)
    return Plan(
        tuple(desk.grants),
        tuple(desk.gives_up),
        desk.waiting,
        tuple(desk.gpus.values()),
        desk.reserved,
        (*desk.ends, *(job for job, _ in desk.grants)),
    )


class _PlanningPass:
    """The working state of one planning pass."""

    def __init__(self, snapshot: Snapshot, score: Score) -> None:
        self.at = snapshot.at
        self.score = score
        self.gpus = {gpu.uuid: gpu for gpu in ledgers(snapshot)}
        self.reserved: dict[GpuUuid, JobId] = {}
        self.grants: list[tuple[JobId, Placement]] = []
        self.gives_up: list[JobId] = []
        self.waiting: dict[JobId, WaitReason] = {}
        self.ends = {job.id: job.expires_at for job in snapshot.jobs if job.holds_memory}
        self._refused: dict[Claim, WaitReason] = {}
        """Answers that hold until the next grant or reservation: long queues repeat themselves."""

    @property
    def has_open_gpus(self) -> bool:
        return len(self.reserved) < len(self.gpus)

    def consider(self, job: Job) -> None:
        """Grant `job` what it asks for, or note why not."""
        if job.claim not in self._refused:
            open_gpus = [gpu for uuid, gpu in self.gpus.items() if uuid not in self.reserved]
            answer = place(job.claim, open_gpus, self.score)
            if isinstance(answer, Placement):
                self._grant(job, answer)
                return
            self._refused[job.claim] = self._explained(job, answer, open_gpus)
        waiting = self.waiting[job.id] = self._refused[job.claim]
        if wait_has_expired(job, self.at):
            self.gives_up.append(job.id)
        else:
            self._keep_for(job, waiting.reserved)

    def _grant(self, job: Job, placement: Placement) -> None:
        self.grants.append((job.id, placement))
        for uuid, memory in placement.allocations:
            self.gpus[uuid] = granted(job.id, job.claim, memory, self.gpus[uuid])
        self._refused.clear()

    def _explained(self, job: Job, refusal: Refusal, open_gpus: Sequence[GpuMemory]) -> WaitReason:
        """Add why the GPUs kept for others are no way out, and when room may be expected."""
        kept = [
            _standing_reason(job, self.gpus[uuid], first) for uuid, first in self.reserved.items()
        ]
        start = expected_start(job.claim, refusal, open_gpus, self.ends, self.at)
        all_of_them = sorted((*refusal.obstacles, *kept), key=lambda each: each.sort_key)
        full = Refusal(tuple(all_of_them), refusal.fits)
        return WaitReason(full, start, reserves(job.claim, full))

    def _keep_for(self, job: Job, gpus: frozenset[GpuUuid]) -> None:
        new = gpus - self.reserved.keys()
        for uuid in new:
            self.reserved[uuid] = job.id
        if new:
            self._refused.clear()


def _standing_reason(job: Job, gpu: GpuMemory, first: JobId) -> Obstacle:
    """Return what lasts longest: a GPU that could never serve says so; else, who came first."""
    own = find_obstacle(job.claim, gpu)
    if own is not None and own.waits_for == ():
        return own
    return reserved_for(first, gpu)


def why_waiting(plan_: Plan, job: Job) -> WaitReason:
    """Return why `job` waits, also where the plan never came to look at it."""
    seen = plan_.waiting.get(job.id)
    if seen is not None:
        return seen
    reasons = tuple(
        _standing_reason(job, gpu, plan_.reserved[gpu.uuid])
        for gpu in plan_.gpus
        if gpu.uuid in plan_.reserved
    )
    return WaitReason(Refusal(reasons))
