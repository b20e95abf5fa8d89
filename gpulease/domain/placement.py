"""Places one claim on GPUs, or explains for each GPU why it does not fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpulease.domain.choice import (
    PlannedGpu,
    Score,
    best_fit,
    choose,
    enough_of,
    fits,
    suits,
    why_unsuitable,
)
from gpulease.domain.gpu import (
    ComputeMode,
    Fault,
    GpuMemory,
    GpuReading,
    GpuUuid,
    JobId,
    LedgerEntry,
    job_title,
)
from gpulease.domain.lease import Claim
from gpulease.units import format_size

_BUSY = 50
"""Percent, from which on a reading of this moment agrees with what is usual."""


class ObstacleKind(StrEnum):
    """Which dimension of a claim failed on a GPU."""

    LOST = "lost"
    UNREADABLE = "unreadable"
    PROHIBITED = "prohibited"
    DRAINED = "drained"
    DIVIDED = "divided"
    TOO_SMALL = "too_small"
    UNMANAGED = "unmanaged"
    LEASED = "leased"
    EXCESS = "excess"
    BUSY = "busy"
    RESERVED = "reserved"
    WINDOW = "window"
    NOT_ASKED_FOR = "not_asked_for"
    NOT_LINKED = "not_linked"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why one GPU cannot take a claim now."""

    gpu: GpuUuid
    index: int
    kind: ObstacleKind
    why: str
    waits_for: tuple[JobId, ...] = ()
    """The jobs that have to end first."""
    mig_index: int | None = None
    """For a MIG device: its number on the GPU with this index."""
    slurm: Mapping[JobId, int] = field(default_factory=dict, compare=False)
    """The numbers in Slurm of jobs that have one."""
    labels: Mapping[JobId, str] = field(default_factory=dict, compare=False)
    """The ids as people see them of elements of arrays."""
    gap: int | None = None
    """The bytes that are free there now, if that is less than the claim needs."""
    excess: int = 0
    """The bytes that the jobs in `waits_for` use above their guarantees, for EXCESS."""

    @property
    def label(self) -> str:
        """The name of the GPU shown to people."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"

    @property
    def sort_key(self) -> tuple[int, int]:
        """The key by which GPUs are listed."""
        return self.index, -1 if self.mig_index is None else self.mig_index


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs for a claim, and the bytes on each."""

    allocations: tuple[tuple[GpuUuid, int], ...]
    bounds: tuple[tuple[GpuUuid, int], ...] = ()
    """With a range: the bytes on each that the job may use while no other needs them."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why the server has too little RAM or too few cores for a claim now."""

    why: str
    waits_for: tuple[JobId, ...] = ()
    """The jobs that have to end first."""
    labels: Mapping[JobId, str] = field(default_factory=dict, compare=False)
    """Their ids as people see them."""
    kind: ObstacleKind = ObstacleKind.LEASED
    """RESERVED: enough is free, and is kept for the job in `waits_for`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a claim does not fit now, for each GPU; the GPUs in `fits` could take it alone."""

    obstacles: tuple[Obstacle, ...]
    fits: tuple[GpuUuid, ...] = ()
    host: Shortage | None = None
    """Why the server itself has too little for it."""

    @property
    def reasons(self) -> tuple[Obstacle | Shortage, ...]:
        """What is in the way, the GPUs first."""
        return self.obstacles if self.host is None else (*self.obstacles, self.host)

    @property
    def waits_for(self) -> tuple[JobId, ...]:
        """The jobs that have to end first, lowest id first."""
        return tuple(sorted({job for each in self.reasons for job in each.waits_for}))

    def labels_of(self, jobs: Iterable[JobId]) -> list[str]:
        """Return the ids of jobs that are in the way, as people see them."""
        known = {job: label for each in self.reasons for job, label in each.labels.items()}
        return [known.get(job, str(job)) for job in jobs]


def place(claim: Claim, gpus: Sequence[GpuMemory], score: Score = best_fit) -> Placement | Refusal:
    """Choose GPUs for `claim`, all or none; among equal scores, the lowest index wins."""
    ranked = sorted(gpus, key=lambda gpu: gpu.sort_key)
    planned = [PlannedGpu(gpu, rank) for rank, gpu in enumerate(ranked)]
    able = [gpu for gpu in planned if fits(claim, gpu)]
    chosen = choose(claim, able, score)
    if chosen is None:
        obstacles = (find_obstacle(claim, gpu) for gpu in gpus)
        refusal = Refusal(
            tuple(each for each in obstacles if each is not None),
            tuple(gpu.uuid for gpu in able),
        )
        return with_missing_links(claim, refusal, gpus)
    return Placement(
        tuple((each.uuid, claim.memory_on(each.allocatable)) for each in chosen),
        bounds_on(claim, chosen),
    )


def bounds_on(claim: Claim, gpus: Iterable[PlannedGpu]) -> tuple[tuple[GpuUuid, int], ...]:
    """Return the bound of a claim in bytes on each of some GPUs; none without a range."""
    found = ((gpu.uuid, claim.bound_on(gpu.allocatable)) for gpu in gpus)
    return tuple((uuid, bound) for uuid, bound in found if bound is not None)


def find_obstacle(claim: Claim, gpu: GpuMemory) -> Obstacle | None:
    """Return why `claim` does not fit on `gpu` now, or None if it fits."""
    found = _found(claim, gpu)
    if found is None:
        return None
    kind, why, jobs = found
    free, gap, excess = gpu.headroom or 0, None, 0
    if kind is not ObstacleKind.NOT_ASKED_FOR and free < claim.memory_on(gpu.allocatable or 0):
        gap = free
    if kind is ObstacleKind.EXCESS:
        excess = sum(entry.excess for entry in gpu.entries if entry.job in jobs)
    return _obstacle(gpu, kind, why, jobs, gap, excess)


def obstacle_kind(claim: Claim, gpu: GpuMemory) -> ObstacleKind | None:
    """Return the kind of what `find_obstacle` returns."""
    found = _found(claim, gpu)
    return None if found is None else found[0]


def asked_back(claim: Claim, refusal: Refusal, gpus: Sequence[GpuMemory]) -> tuple[Obstacle, ...]:
    """Return the GPUs on which jobs are asked to give memory back, so that `claim` fits.

    None if that is not enough. The fewest jobs are asked, then those that started last: both change
    less often than how much they use.
    """
    able = [each for each in refusal.obstacles if each.kind is ObstacleKind.EXCESS]
    able.sort(key=lambda each: (len(each.waits_for), -max(each.waits_for)))
    if claim.linked:
        known = {gpu.uuid: gpu for gpu in gpus}
        in_order = [known[each] for each in (*refusal.fits, *(each.gpu for each in able))]
        chosen = {gpu.uuid for gpu in enough_of(claim, in_order, _reading) or ()}
        return tuple(each for each in able if each.gpu in chosen)
    missing = claim.gpus - len(refusal.fits)
    return tuple(able[:missing]) if 0 < missing <= len(able) else ()


def with_missing_links(claim: Claim, refusal: Refusal, gpus: Sequence[GpuMemory]) -> Refusal:
    """Return a refusal in which GPUs that fit are obstacles, if links are what is missing."""
    fitting = [gpu for gpu in gpus if gpu.uuid in refusal.fits]
    is_short = len(fitting) < claim.gpus
    if not claim.linked or is_short or enough_of(claim, fitting, _reading) is not None:
        return refusal
    unlinked = []
    for gpu in fitting:
        linked = {link.gpu for link in gpu.reading.links if link.nvlinks}
        count = len(linked.intersection(refusal.fits)) or "none"
        why = f"NVLink connects it with {count} of the others that have room"
        unlinked.append(_obstacle(gpu, ObstacleKind.NOT_LINKED, why, ()))
    found = sorted((*refusal.obstacles, *unlinked), key=lambda each: each.sort_key)
    return Refusal(tuple(found), host=refusal.host)


def _reading(gpu: GpuMemory) -> GpuReading:
    return gpu.reading


def _obstacle(
    gpu: GpuMemory,
    kind: ObstacleKind,
    why: str,
    waits_for: tuple[JobId, ...],
    gap: int | None = None,
    excess: int = 0,
) -> Obstacle:
    known = gpu.reading.mig_index, gpu.slurm, gpu.labels
    return Obstacle(gpu.uuid, gpu.index, kind, why, waits_for, *known, gap, excess)


_Found = tuple[ObstacleKind, str, tuple[JobId, ...]] | None


def _found(claim: Claim, gpu: GpuMemory) -> _Found:
    unsuitable = why_unsuitable(claim, gpu.reading)
    if unsuitable is not None:
        return ObstacleKind.NOT_ASKED_FOR, unsuitable, ()
    return _why_out_of_service(gpu) or _why_too_full(claim, gpu)


def _why_out_of_service(gpu: GpuMemory) -> _Found:
    detail = gpu.reading.detail
    if gpu.reading.fault is Fault.LOST:
        return ObstacleKind.LOST, detail or "it fell off the bus", ()
    if gpu.reading.mig_mode:
        return (
            ObstacleKind.DIVIDED,
            "it is divided by MIG; its MIG devices are leased instead",
            (),
        )
    if gpu.reading.fault is not None or gpu.headroom is None:
        return (
            ObstacleKind.UNREADABLE,
            detail or gpu.mode_restriction or "its memory cannot be read",
            (),
        )
    if gpu.reading.compute_mode is ComputeMode.PROHIBITED:
        return ObstacleKind.PROHIBITED, gpu.mode_restriction or "", ()
    if gpu.drained is not None:
        return ObstacleKind.DRAINED, gpu.drained, ()
    return None


def _why_too_full(claim: Claim, gpu: GpuMemory) -> _Found:
    allocatable, unmanaged = gpu.allocatable or 0, gpu.unmanaged or 0
    memory = claim.memory_on(allocatable)
    if not can_be_combined(claim, gpu):
        return ObstacleKind.DIVIDED, "a job on several GPUs cannot use a MIG device", ()
    if memory > allocatable or memory <= 0:
        return ObstacleKind.TOO_SMALL, f"only {format_size(allocatable)} of it can be leased", ()
    if claim.exclusive and gpu.has_unmanaged_process:
        return ObstacleKind.UNMANAGED, _unmanaged_use(gpu), ()
    if gpu.one_process and gpu.has_unmanaged_compute:
        return ObstacleKind.UNMANAGED, f"{_unmanaged_use(gpu)}, and {gpu.mode_restriction}", ()
    if memory > allocatable - unmanaged:
        also = f"; {_unmanaged_use(gpu)}" if gpu.jobs_without_lease else ""
        return (
            ObstacleKind.UNMANAGED,
            f"{format_size(unmanaged)} is used outside any lease{also}",
            (),
        )
    return _why_leased(claim, memory, gpu)


def _why_leased(claim: Claim, memory: int, gpu: GpuMemory) -> _Found:
    holders = gpu.holders
    exclusive = tuple(entry.job for entry in gpu.entries if entry.exclusive)
    if exclusive:
        return ObstacleKind.LEASED, f"{_hold(gpu, exclusive)} an exclusive lease on it", exclusive
    if claim.exclusive and holders:
        return ObstacleKind.LEASED, f"{_hold(gpu, holders)} a lease on it", holders
    if gpu.one_process and holders:
        return (
            ObstacleKind.LEASED,
            f"{_hold(gpu, holders)} a lease on it, and {gpu.mode_restriction}",
            holders,
        )
    return _why_no_gap(claim, memory, gpu)


def _why_no_gap(claim: Claim, memory: int, gpu: GpuMemory) -> _Found:
    headroom, elsewhere = gpu.headroom or 0, gpu.reading.leased_elsewhere
    outside = (gpu.unmanaged or 0) + elsewhere
    if memory > (gpu.allocatable or 0) - outside or (claim.exclusive and gpu.reading.neighbours):
        why = f"daemons of other users lease {format_size(elsewhere)} more than they use"
        return ObstacleKind.UNMANAGED, why, ()
    if memory > headroom:
        if back := gpu.excess_of(memory - (gpu.allocatable or 0) + gpu.committed + outside):
            jobs = tuple(sorted(entry.job for entry in back))
            size = format_size(sum(entry.excess for entry in back))
            use = "uses" if len(jobs) == 1 else "use"
            why = f"{_jobs(gpu, jobs)} {use} {size} above what is guaranteed"
            return ObstacleKind.EXCESS, why, jobs
        free = format_size(headroom) if headroom else "nothing"
        return ObstacleKind.LEASED, f"{free} is free", gpu.holders
    return None


def _unmanaged_use(gpu: GpuMemory) -> str:
    if not gpu.jobs_without_lease:
        return "a process outside any lease is on it"
    verb = "is" if len(gpu.jobs_without_lease) == 1 else "are"
    return f"{_jobs(gpu, gpu.jobs_without_lease)} {verb} on it without a lease"


def _hold(gpu: GpuMemory, jobs: Sequence[JobId]) -> str:
    return f"{_jobs(gpu, jobs)} {'holds' if len(jobs) == 1 else 'hold'}"


def _jobs(gpu: GpuMemory, jobs: Sequence[JobId]) -> str:
    """Return a job as people know it, such as "job 7 of Slurm", or how many there are."""
    if len(jobs) > 1:
        return f"{len(jobs)} jobs"
    return "".join(job_title(gpu.labels.get(job, str(job)), gpu.slurm.get(job)) for job in jobs)


def can_be_combined(claim: Claim, gpu: GpuMemory) -> bool:
    """Tell whether `gpu` can be one of the claimed number of GPUs.

    A MIG device is leased alone: a CUDA process sees only one of them (NVIDIA, "MIG User Guide",
    CUDA_VISIBLE_DEVICES).
    """
    return claim.gpus == 1 or gpu.reading.parent is None


def can_ever_hold(claim: Claim, gpu: GpuMemory) -> bool:
    """Tell whether `claim` could fit on `gpu` if it were empty; unknown counts as yes."""
    if not suits(claim, gpu.reading):
        return False
    if gpu.allocatable is None:
        return gpu.reading.fault is not None
    return can_be_combined(claim, gpu) and 0 < claim.memory_on(gpu.allocatable) <= gpu.allocatable


def shared_by_too_many(gpu: GpuMemory) -> Obstacle:
    """Return the obstacle on a GPU with free memory that another job would slow down too much."""
    jobs = _jobs(gpu, gpu.holders)
    busy, one = gpu.reading.utilization, len(gpu.holders) == 1
    if busy is None or busy >= _BUSY:
        why = f"{jobs} {'keeps' if one else 'keep'} it busy"
        why += "" if busy is None else f" ({busy} %)"
    else:  # at this moment; the plan counts what its jobs usually use
        why = f"{jobs} {'is' if one else 'are'} expected to keep it busy ({busy} % now)"
    return _obstacle(gpu, ObstacleKind.BUSY, why, gpu.holders)


def reserved_for(job: JobId, label: str, gpu: GpuMemory) -> Obstacle:
    """Return the obstacle on a GPU that is reserved for `job`, which is earlier in the queue."""
    why = f"it is reserved for job {label}, which is earlier in the queue"
    return replace(_obstacle(gpu, ObstacleKind.RESERVED, why, (job,)), labels={job: label})


def granted(job: JobId, claim: Claim, memory: int, gpu: GpuMemory) -> GpuMemory:
    """Return the ledger of `gpu` after `job` is granted `memory` bytes there."""
    bound = claim.bound_on(gpu.allocatable or 0)
    return gpu.with_entry(LedgerEntry(job, memory, claim.exclusive, False, used=0, bound=bound))
