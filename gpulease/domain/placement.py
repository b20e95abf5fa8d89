"""Where a claim goes: filter, score, pick; and where it cannot go, why not, for each GPU.

Placement policies are functions of one signature, `Score`; a higher score is taken first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpulease.domain.gpu import ComputeMode, Fault, GpuMemory, GpuUuid, JobId, LedgerEntry
from gpulease.domain.lease import Claim
from gpulease.units import format_size

Score = Callable[[Claim, GpuMemory], float]


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
    RESERVED = "reserved"


ENDS_WITH_LEASES = frozenset({ObstacleKind.LEASED})
"""Obstacles that go away when leases end; the others are out of the queue's power."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why one GPU cannot take a claim now."""

    gpu: GpuUuid
    index: int
    kind: ObstacleKind
    why: str
    waits_for: tuple[JobId, ...] = ()
    """The jobs whose end would help."""
    mig_index: int | None = None
    """Of a MIG device, on the GPU that has this index."""

    @property
    def label(self) -> str:
        """What people call the GPU."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"

    @property
    def sort_key(self) -> tuple[int, int]:
        """Where the GPU stands when people count them."""
        return self.index, -1 if self.mig_index is None else self.mig_index


@dataclass(frozen=True, slots=True)
class Placement:
    """Here: which GPUs, and how many bytes on each."""

    allocations: tuple[tuple[GpuUuid, int], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now: why, for each GPU that cannot take the claim; `fits` can, but are too few."""

    obstacles: tuple[Obstacle, ...]
    fits: tuple[GpuUuid, ...] = ()

    @property
    def waits_for(self) -> tuple[JobId, ...]:
        """The jobs whose end would help, lowest id first."""
        return tuple(sorted({job for each in self.obstacles for job in each.waits_for}))


def best_fit(claim: Claim, gpu: GpuMemory) -> float:
    """Prefer the GPU that would be left with the least headroom."""
    return -float((gpu.headroom or 0) - claim.memory_on(gpu.allocatable or 0))


def spread(claim: Claim, gpu: GpuMemory) -> float:
    """Prefer the GPU that would be left with the most headroom."""
    return -best_fit(claim, gpu)


def place(claim: Claim, gpus: Sequence[GpuMemory], score: Score = best_fit) -> Placement | Refusal:
    """Choose GPUs for `claim`, all or none; equal scores go to the lowest index."""
    obstacles = {gpu.uuid: find_obstacle(claim, gpu) for gpu in gpus}
    fits = [gpu for gpu in gpus if obstacles[gpu.uuid] is None]
    if len(fits) < claim.gpus:
        return Refusal(
            tuple(each for each in obstacles.values() if each is not None),
            tuple(gpu.uuid for gpu in fits),
        )
    fits.sort(key=lambda gpu: (-score(claim, gpu), gpu.sort_key))
    # In the order in which people and nvidia-smi count them.
    chosen = sorted(fits[: claim.gpus], key=lambda gpu: gpu.sort_key)
    return Placement(tuple((gpu.uuid, claim.memory_on(gpu.allocatable or 0)) for gpu in chosen))


def find_obstacle(claim: Claim, gpu: GpuMemory) -> Obstacle | None:
    """Return why `claim` does not fit on `gpu` now, or None where it fits."""
    found = _out_of_service(gpu) or _without_room(claim, gpu)
    if found is None:
        return None
    obstacle, why, waits_for = found
    return Obstacle(gpu.uuid, gpu.index, obstacle, why, waits_for, gpu.reading.mig_index)


_Found = tuple[ObstacleKind, str, tuple[JobId, ...]] | None


def _out_of_service(gpu: GpuMemory) -> _Found:
    detail = gpu.reading.detail
    if gpu.reading.fault is Fault.LOST:
        return ObstacleKind.LOST, detail or "it fell off the bus", ()
    if gpu.reading.mig_mode:
        return (
            ObstacleKind.DIVIDED,
            "it is divided by MIG, and its MIG devices are leased instead",
            (),
        )
    if gpu.reading.fault is not None or gpu.headroom is None:
        return ObstacleKind.UNREADABLE, detail or gpu.mode or "its memory cannot be read", ()
    if gpu.reading.compute_mode is ComputeMode.PROHIBITED:
        return ObstacleKind.PROHIBITED, gpu.mode or "", ()
    if gpu.drained is not None:
        return ObstacleKind.DRAINED, gpu.drained, ()
    return None


def _without_room(claim: Claim, gpu: GpuMemory) -> _Found:
    allocatable, unmanaged = gpu.allocatable or 0, gpu.unmanaged or 0
    demand = claim.memory_on(allocatable)
    if not spans(claim, gpu):
        return ObstacleKind.DIVIDED, "a job of several GPUs cannot use a MIG device", ()
    if demand > allocatable or demand <= 0:
        return ObstacleKind.TOO_SMALL, f"it has {format_size(allocatable)} to lease in all", ()
    if claim.exclusive and _unmanaged_processes(gpu):
        return ObstacleKind.UNMANAGED, _who_is_there(gpu), ()
    if gpu.one_process and gpu.is_computed_on:
        return ObstacleKind.UNMANAGED, f"{_who_is_there(gpu)}, and {gpu.mode}", ()
    if demand > allocatable - unmanaged:
        also = f"; {_who_is_there(gpu)}" if gpu.jobs_without_lease else ""
        return (
            ObstacleKind.UNMANAGED,
            f"{format_size(unmanaged)} is used outside any lease{also}",
            (),
        )
    return _held_by_leases(claim, demand, gpu)


def _held_by_leases(claim: Claim, demand: int, gpu: GpuMemory) -> _Found:
    holders = tuple(sorted(holding.job for holding in gpu.entries))
    exclusive = tuple(holding.job for holding in gpu.entries if holding.exclusive)
    if exclusive:
        return ObstacleKind.LEASED, f"{_jobs(exclusive)} holds it for itself alone", exclusive
    if claim.exclusive and holders:
        return ObstacleKind.LEASED, f"{_jobs(holders)} holds a lease on it", holders
    if gpu.one_process and holders:
        return ObstacleKind.LEASED, f"{_jobs(holders)} holds a lease on it, and {gpu.mode}", holders
    headroom = gpu.headroom or 0
    if demand > headroom:
        return ObstacleKind.LEASED, f"{format_size(headroom)} is free", holders
    return None


def _unmanaged_processes(gpu: GpuMemory) -> bool:
    """Tell whether a process outside the leases is on the GPU; unknown counts as yes.

    Memory that no process holds (residue of the driver) does not stand against `--exclusive`.
    """
    processes = gpu.reading.processes
    return bool(gpu.unmanaged_processes) if processes is not None else bool(gpu.unmanaged)


def _who_is_there(gpu: GpuMemory) -> str:
    if not gpu.jobs_without_lease:
        return "a process outside any lease is on it"
    verb = "is" if len(gpu.jobs_without_lease) == 1 else "are"
    return f"{_jobs(gpu.jobs_without_lease)} {verb} on it without a lease"


def _jobs(jobs: Sequence[JobId]) -> str:
    return "job " + str(jobs[0]) if len(jobs) == 1 else "jobs " + ", ".join(map(str, jobs))


def spans(claim: Claim, gpu: GpuMemory) -> bool:
    """Tell whether `gpu` may be one of as many as are claimed.

    A MIG device is only ever leased alone: CUDA shows a process one of them and no more
    (NVIDIA, "MIG User Guide", CUDA_VISIBLE_DEVICES).
    """
    return claim.gpus == 1 or gpu.reading.parent is None


def can_ever_hold(claim: Claim, gpu: GpuMemory) -> bool:
    """Tell whether `claim` could fit on `gpu` if nothing else were there; unknown counts as yes."""
    if gpu.allocatable is None:
        return gpu.reading.fault is not None
    return spans(claim, gpu) and 0 < claim.memory_on(gpu.allocatable) <= gpu.allocatable


def reserved_for(job: JobId, gpu: GpuMemory) -> Obstacle:
    """Return the find_obstacle of a GPU that an earlier waiting job is to have first."""
    why = f"job {job} waits for it and came first"
    return Obstacle(gpu.uuid, gpu.index, ObstacleKind.RESERVED, why, (job,), gpu.reading.mig_index)


def granted(job: JobId, claim: Claim, memory: int, gpu: GpuMemory) -> GpuMemory:
    """Return the ledger of `gpu` after `job` was granted `memory` bytes there."""
    return gpu.with_entry(LedgerEntry(job, memory, claim.exclusive, running=False, used=0))
