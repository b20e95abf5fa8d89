"""The ledger of one GPU: what is taken, by whom, and what may still be leased.

Pure sums over one reading of the GPU and the leases on it. Where a figure is unknown it stays
unknown: a GPU whose memory cannot be read offers nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NewType

GpuUuid = NewType("GpuUuid", str)
JobId = NewType("JobId", int)


class Fault(StrEnum):
    """Why a GPU could not be read."""

    UNREADABLE = "unreadable"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process that holds memory of a GPU, as the driver tells it."""

    pid: int
    memory: int | None
    """Bytes; None where the driver does not say."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at one GPU; any field but its identity may be unknown."""

    uuid: GpuUuid
    index: int
    name: str
    total: int | None = None
    used: int | None = None
    """Bytes in use; without `reserved` this includes what the driver holds back for itself."""
    reserved: int | None = None
    """Bytes that the driver holds back, where it tells them apart (NVML's memory info v2)."""
    processes: tuple[ProcessReading, ...] | None = None
    """None where the list could not be had, which is not the same as an empty list."""
    utilization: int | None = None
    """Percent of the last sampling period in which a kernel ran."""
    temperature: int | None = None
    """Degrees Celsius."""
    fault: Fault | None = None
    detail: str | None = None
    """What the driver said when the GPU could not be read, for people."""
    minor: int | None = None
    """The number in the name of its device node, which is not its index."""
    parent: GpuUuid | None = None
    """Of a MIG device: the GPU that it is a part of, whose index it has."""
    place: int | None = None
    """Of a MIG device: its number on that GPU."""
    divided: bool = False
    """It is in MIG mode: its parts are leased, and not itself."""

    @property
    def label(self) -> str:
        """What people call it: its index, and of a MIG device its place on that GPU."""
        return str(self.index) if self.place is None else f"{self.index}:{self.place}"


@dataclass(frozen=True, slots=True)
class Holding:
    """What one job holds on one GPU."""

    job: JobId
    memory: int
    """Leased bytes."""
    exclusive: bool = False
    running: bool = False
    """Its worker has been started, so that a part of what is used may be its."""
    used: int | None = None
    """Bytes that its processes use now; None where the driver does not say."""

    @property
    def committed(self) -> int:
        """What to count against the GPU: the lease, or more where more is used."""
        return max(self.memory, self.used or 0)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The ledger of one GPU at one moment; sizes in bytes."""

    reading: GpuReading
    allocatable: int | None
    unmanaged: int | None
    holdings: tuple[Holding, ...] = ()
    strangers: tuple[ProcessReading, ...] = ()
    """The processes on it that belong to no job of ours."""
    drained: str | None = None
    """Why nothing more may be granted here, if an admin said so."""

    @property
    def uuid(self) -> GpuUuid:
        return self.reading.uuid

    @property
    def index(self) -> int:
        return self.reading.index

    @property
    def leased(self) -> int:
        return sum(holding.memory for holding in self.holdings)

    @property
    def committed(self) -> int:
        return sum(holding.committed for holding in self.holdings)

    @property
    def headroom(self) -> int | None:
        """What may be leased now; None where something that decides it is unknown."""
        if self.allocatable is None or self.unmanaged is None:
            return None
        if any(holding.exclusive for holding in self.holdings):
            return 0
        return max(0, self.allocatable - self.committed - self.unmanaged)

    def holds(self, holding: Holding) -> "GpuMemory":
        """Return this ledger with one more holding."""
        return replace(self, holdings=(*self.holdings, holding))


def take_stock(
    reading: GpuReading,
    holdings: Iterable[Holding],
    jobs_by_pid: Mapping[int, JobId],
    margin: int = 0,
    drained: str | None = None,
) -> GpuMemory:
    """Draw up the ledger of one GPU.

    Args:
        reading: one look at the GPU.
        holdings: the leases on it; their `used` is found here and need not be given.
        jobs_by_pid: which job a process belongs to; an absent pid belongs to none of ours.
        margin: bytes that are never leased.
        drained: why nothing more may be granted, or None.
    """
    used_by_job = _used_by_job(reading, jobs_by_pid)
    seen = tuple(
        replace(holding, used=None if used_by_job is None else used_by_job.get(holding.job, 0))
        for holding in holdings
    )
    return GpuMemory(
        reading,
        _allocatable(reading, margin),
        _unmanaged(reading, seen, jobs_by_pid),
        seen,
        tuple(each for each in reading.processes or () if each.pid not in jobs_by_pid),
        drained,
    )


def _allocatable(reading: GpuReading, margin: int) -> int | None:
    if reading.fault is not None or reading.total is None:
        return None
    return max(0, reading.total - (reading.reserved or 0) - margin)


def _used_by_job(reading: GpuReading, jobs_by_pid: Mapping[int, JobId]) -> dict[JobId, int] | None:
    """Sum what each job's processes use, or None where a figure is missing."""
    if reading.processes is None:
        return None
    sums: dict[JobId, int] = {}
    for process in reading.processes:
        if process.memory is None:
            return None
        job = jobs_by_pid.get(process.pid)
        if job is not None:
            sums[job] = sums.get(job, 0) + process.memory
    return sums


def _unmanaged(
    reading: GpuReading, holdings: Sequence[Holding], jobs_by_pid: Mapping[int, JobId]
) -> int | None:
    if reading.fault is not None or reading.used is None:
        return None
    if all(holding.used is not None for holding in holdings):
        ours = sum(holding.used or 0 for holding in holdings)
    else:
        ours = sum(
            holding.memory for holding in holdings if _may_use(holding, reading, jobs_by_pid)
        )
    return max(0, reading.used - ours)


def _may_use(holding: Holding, reading: GpuReading, jobs_by_pid: Mapping[int, JobId]) -> bool:
    """Tell whether a part of what is used may be this job's, where figures are missing."""
    if reading.processes is None:
        return holding.running
    return any(jobs_by_pid.get(process.pid) == holding.job for process in reading.processes)
