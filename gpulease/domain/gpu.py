"""The ledger of one GPU: what is taken, by whom, and what may still be leased.

Pure sums over one reading of the GPU and the leases on it. Where a figure is unknown it stays
unknown: a GPU whose memory cannot be read offers nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NewType

GpuUuid = NewType("GpuUuid", str)
JobId = NewType("JobId", int)


class Fault(StrEnum):
    """Why a GPU could not be read."""

    UNREADABLE = "unreadable"
    LOST = "lost"


class ComputeMode(StrEnum):
    """How many processes the driver lets use a GPU (nvml.h, nvmlComputeMode_t)."""

    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive process"
    PROHIBITED = "prohibited"


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process that holds memory of a GPU, as the driver tells it."""

    pid: int
    memory: int | None
    """Bytes; None where the driver does not say."""
    utilization: int | None = None
    """Percent of the time of late in which it computed; None where nobody tells it apart."""
    graphics: bool = False
    """It only draws: its context does not count for the compute mode."""


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
    mig_index: int | None = None
    """Of a MIG device: its number on that GPU."""
    device_nodes: tuple[str, ...] | None = None
    """Of a MIG device: the device nodes that it takes beside its GPU's; None if not known."""
    mig_mode: bool = False
    """It is in MIG mode: its parts are leased, and not itself."""
    compute_mode: ComputeMode | None = ComputeMode.DEFAULT
    """None while the driver does not answer; a driver without compute modes has the default."""

    @property
    def label(self) -> str:
        """What people call it: its index, and of a MIG device its place on that GPU."""
        if self.mig_index is None and self.uuid.startswith("MIG-"):
            # One that is not there any more, of which the record has kept no place.
            return f"{self.index}:?"
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
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
    entries: tuple[LedgerEntry, ...] = ()
    unmanaged_processes: tuple[ProcessReading, ...] = ()
    """The processes on it that belong to no job with a lease on it."""
    jobs_without_lease: tuple[JobId, ...] = ()
    """The jobs among them: they have a lease elsewhere, and none on this GPU."""
    drained: str | None = None
    """Why nothing more may be granted here, if an admin said so."""
    one_process: bool = False
    """Its compute mode admits one process at a time, which is no MPS server."""

    @property
    def uuid(self) -> GpuUuid:
        return self.reading.uuid

    @property
    def index(self) -> int:
        return self.reading.index

    @property
    def sort_key(self) -> tuple[int, int]:
        """Where it stands when people count GPUs: by index, and its parts after it."""
        return self.index, -1 if self.reading.mig_index is None else self.reading.mig_index

    @property
    def leased(self) -> int:
        return sum(holding.memory for holding in self.entries)

    @property
    def committed(self) -> int:
        return sum(holding.committed for holding in self.entries)

    @property
    def headroom(self) -> int | None:
        """What may be leased now; None where something that decides it is unknown."""
        mode = self.reading.compute_mode
        if self.allocatable is None or self.unmanaged is None or mode is None:
            return None
        if any(holding.exclusive for holding in self.entries) or mode is ComputeMode.PROHIBITED:
            return 0
        if self.one_process and (self.entries or self.is_computed_on):
            return 0
        return max(0, self.allocatable - self.committed - self.unmanaged)

    @property
    def is_computed_on(self) -> bool:
        """Whether a process without a lease computes on it; unknown counts as yes."""
        if self.reading.processes is None:
            return bool(self.unmanaged)
        return any(not process.graphics for process in self.unmanaged_processes)

    @property
    def mode(self) -> str | None:
        """What its compute mode does to leases, as a sentence; None: nothing."""
        if self.reading.mig_mode or self.reading.fault is not None:
            return None
        if self.reading.compute_mode is None:
            return "its compute mode cannot be read"
        if self.reading.compute_mode is ComputeMode.PROHIBITED:
            return "its compute mode is prohibited: no program can use it"
        if self.one_process:
            return "its compute mode is exclusive process: it takes one lease at a time"
        return None

    def with_entry(self, holding: LedgerEntry) -> "GpuMemory":
        """Return this ledger with one more holding."""
        return replace(self, entries=(*self.entries, holding))


def build_ledger(
    reading: GpuReading,
    holdings: Iterable[LedgerEntry],
    jobs_by_pid: Mapping[int, JobId],
    margin: int = 0,
    drained: str | None = None,
    mps_servers: Collection[int] = (),
) -> GpuMemory:
    """Draw up the ledger of one GPU.

    Args:
        reading: one look at the GPU.
        holdings: the leases on it; their `used` is found here and need not be given.
        jobs_by_pid: which job a process belongs to; an absent pid belongs to none of ours.
        margin: bytes that are never leased.
        drained: why nothing more may be granted, or None.
        mps_servers: the pids of MPS servers, on whose account the memory of jobs may stand.
    """
    whose = _Whose(reading, jobs_by_pid, mps_servers)
    seen = tuple(replace(holding, used=whose.used_by(holding.job)) for holding in holdings)
    return GpuMemory(
        reading,
        _allocatable(reading, margin),
        _unmanaged(whose, seen),
        seen,
        whose.strangers(seen),
        whose.without_lease(seen),
        drained,
        reading.compute_mode is ComputeMode.EXCLUSIVE_PROCESS and not whose.is_served,
    )


def _allocatable(reading: GpuReading, margin: int) -> int | None:
    if reading.fault is not None or reading.total is None:
        return None
    return max(0, reading.total - (reading.reserved or 0) - margin)


def _unmanaged(whose: "_Whose", holdings: Sequence[LedgerEntry]) -> int | None:
    """Return what is used by nobody's lease; a job whose figure is missing uses its lease.

    What is known to be a stranger's is never taken for a job's.
    """
    reading = whose.reading
    if reading.fault is not None or reading.used is None:
        return None
    most = reading.used if reading.total is None else reading.total
    # The driver tells the sum and the processes in two calls; between them, either may grow.
    listed = sum(process.memory or 0 for process in reading.processes or ())
    used = max(reading.used, min(listed, most))
    ours = sum(whose.share(holding) for holding in holdings)
    strangers = sum(process.memory or 0 for process in whose.strangers(holdings))
    return max(0, used - ours, min(strangers, most))


@dataclass(frozen=True, slots=True)
class _Whose:
    """Whose the memory on one GPU is, as far as the driver says."""

    reading: GpuReading
    jobs_by_pid: Mapping[int, JobId]
    mps_servers: Collection[int]

    @property
    def is_served(self) -> bool:
        """Whether an MPS server is there, which is not itself a part of a job."""
        return any(
            process.pid in self.mps_servers and process.pid not in self.jobs_by_pid
            for process in self.reading.processes or ()
        )

    def used_by(self, job: JobId) -> int | None:
        """Return the bytes of a job's processes, or None where a figure is missing."""
        if self.reading.processes is None:
            return None
        own = [each for each in self.reading.processes if self.jobs_by_pid.get(each.pid) == job]
        if any(each.memory is None for each in own):
            return None
        # Drivers differ in whether the clients of an MPS server are listed beside it.
        if not own and self.is_served:
            return None
        return sum(each.memory or 0 for each in own)

    def share(self, holding: LedgerEntry) -> int:
        """Return the bytes to take for a job's: its figure, or its lease where that is missing."""
        if holding.used is not None:
            return holding.used
        return holding.memory if self.may_use(holding) else 0

    def may_use(self, holding: LedgerEntry) -> bool:
        """Tell whether a part of what is used may be this job's, whose figure is missing."""
        if self.reading.processes is None or self.is_served:
            return holding.running
        return any(
            self.jobs_by_pid.get(process.pid) == holding.job for process in self.reading.processes
        )

    def strangers(self, holdings: Sequence[LedgerEntry]) -> tuple[ProcessReading, ...]:
        """Return the processes of no holder; an MPS server works for the holders that run."""
        holders = {holding.job for holding in holdings}
        served = any(holding.running for holding in holdings)
        return tuple(
            process
            for process in self.reading.processes or ()
            if self.jobs_by_pid.get(process.pid) not in holders
            and not (served and process.pid in self.mps_servers)
        )

    def without_lease(self, holdings: Sequence[LedgerEntry]) -> tuple[JobId, ...]:
        """Return the jobs of processes here that have no lease on this GPU, lowest id first."""
        found = {self.jobs_by_pid.get(each.pid) for each in self.strangers(holdings)}
        return tuple(sorted(job for job in found if job is not None))
