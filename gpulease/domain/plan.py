"""One scheduling decision: which queued jobs get which GPUs, and why the others wait.

`plan` is a pure function of a snapshot. The order of the queue and its reservations are in
`queue`, the choice of GPUs in `placement`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpulease.domain.eligibility import Block, blocks, next_begin
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


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a job waits, as of one plan."""

    refusal: Refusal
    expected_start_at: datetime | None = None
    reserved: frozenset[GpuUuid] = frozenset()
    """The GPUs reserved for the job: no later job starts on them before it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about the queue."""

    grants: tuple[tuple[JobId, Placement], ...]
    gives_up: tuple[JobId, ...]
    waiting: Mapping[JobId, WaitReason]
    """For the jobs that were considered. All later jobs wait for the GPUs reserved for these."""
    gpus: tuple[GpuMemory, ...]
    """The ledgers after the grants."""
    reserved: Mapping[GpuUuid, JobId]
    """The reserved GPUs, and the job of each."""
    holders: tuple[JobId, ...] = ()
    """The jobs that hold memory after the grants."""
    blocked: Mapping[JobId, Block] = field(default_factory=dict)
    """The queued jobs that may not start now, and why."""

    @property
    def wakes_at(self) -> datetime | None:
        """When the next begin time comes, and the queue has to be planned again."""
        return next_begin(self.blocked)

    @property
    def is_closed(self) -> bool:
        """Whether every job submitted now has to wait: all GPUs are reserved."""
        return len(self.reserved) == len(self.gpus)


def ledgers(snapshot: Snapshot) -> tuple[GpuMemory, ...]:
    """Return the ledger of every GPU."""
    entries: dict[GpuUuid, list[LedgerEntry]] = {}
    for job in snapshot.jobs:
        if job.holds_memory:
            for lease in job.leases:
                entries.setdefault(lease.gpu, []).append(job.ledger_entry(lease))
    return tuple(
        build_ledger(
            reading,
            entries.get(reading.uuid, ()),
            snapshot.jobs_by_pid,
            snapshot.margin,
            _drained(reading, snapshot.drained),
            snapshot.mps_servers,
        )
        for reading in snapshot.readings
    )


def _drained(reading: GpuReading, drained: Mapping[GpuUuid, str]) -> str | None:
    """Return why a GPU, or the GPU of a MIG device, takes no new leases; None if it does."""
    own = drained.get(reading.uuid)
    return own if own is not None or reading.parent is None else drained.get(reading.parent)


def plan(snapshot: Snapshot, score: Score = best_fit) -> Plan:
    """Decide which jobs start where, within the headroom and the order of the queue."""
    planning = _PlanningPass(snapshot, score)
    blocked = blocks(snapshot.jobs, snapshot.at)
    for job in in_order(job for job in snapshot.jobs if not job.holds_memory):
        if job.id in blocked:
            planning.pass_over(job)
        elif planning.has_unreserved_gpus or wait_has_expired(job, snapshot.at):
            planning.consider(job)
    return Plan(
        tuple(planning.grants),
        tuple(planning.gives_up),
        planning.waiting,
        tuple(planning.gpus.values()),
        planning.reserved,
        (*planning.ends, *(job for job, _ in planning.grants)),
        blocked,
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
        """Refusals by claim, valid until the next grant or reservation: most claims repeat."""

    @property
    def has_unreserved_gpus(self) -> bool:
        return len(self.reserved) < len(self.gpus)

    def consider(self, job: Job) -> None:
        """Grant `job` its claim, or note why it waits."""
        if job.claim not in self._refused:
            unreserved = [gpu for uuid, gpu in self.gpus.items() if uuid not in self.reserved]
            answer = place(job.claim, unreserved, self.score)
            if isinstance(answer, Placement):
                self._grant(job, answer)
                return
            self._refused[job.claim] = self._explained(job, answer, unreserved)
        waiting = self.waiting[job.id] = self._refused[job.claim]
        if wait_has_expired(job, self.at):
            self.gives_up.append(job.id)
        else:
            self._reserve(job, waiting.reserved)

    def pass_over(self, job: Job) -> None:
        """Note that a blocked job gives up."""
        if wait_has_expired(job, self.at):
            self.gives_up.append(job.id)

    def _grant(self, job: Job, placement: Placement) -> None:
        self.grants.append((job.id, placement))
        for uuid, memory in placement.allocations:
            self.gpus[uuid] = granted(job.id, job.claim, memory, self.gpus[uuid])
        self._refused.clear()

    def _explained(self, job: Job, refusal: Refusal, unreserved: Sequence[GpuMemory]) -> WaitReason:
        """Add the obstacles on reserved GPUs, and the expected start."""
        reserved = [
            _obstacle_on_reserved(job, self.gpus[uuid], first)
            for uuid, first in self.reserved.items()
        ]
        start = expected_start(job.claim, refusal, unreserved, self.ends, self.at)
        obstacles = sorted((*refusal.obstacles, *reserved), key=lambda each: each.sort_key)
        full = Refusal(tuple(obstacles), refusal.fits)
        return WaitReason(full, start, reserves(job.claim, full))

    def _reserve(self, job: Job, gpus: frozenset[GpuUuid]) -> None:
        new = gpus - self.reserved.keys()
        for uuid in new:
            self.reserved[uuid] = job.id
        if new:
            self._refused.clear()


def _obstacle_on_reserved(job: Job, gpu: GpuMemory, first: JobId) -> Obstacle:
    """Return the GPU's own obstacle if no job's end removes it, else the reservation."""
    own = find_obstacle(job.claim, gpu)
    if own is not None and own.waits_for == ():
        return own
    return reserved_for(first, gpu)


def why_waiting(plan_: Plan, job: Job) -> WaitReason:
    """Return why `job` waits, even if the plan did not consider it."""
    seen = plan_.waiting.get(job.id)
    if seen is not None:
        return seen
    reasons = tuple(
        _obstacle_on_reserved(job, gpu, plan_.reserved[gpu.uuid])
        for gpu in plan_.gpus
        if gpu.uuid in plan_.reserved
    )
    return WaitReason(Refusal(reasons))
