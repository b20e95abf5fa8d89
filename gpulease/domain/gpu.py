"""The memory ledger of one GPU: what is leased, what is used, and what may still be leased.

Pure sums over one reading of the GPU and the leases on it, in bytes. Unknown values stay unknown: a
GPU whose memory cannot be read takes no new lease.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NewType

from gpulease.units import MIB

GpuUuid = NewType("GpuUuid", str)
JobId = NewType("JobId", int)
LARGEST_ID = (1 << 63) - 1
"""The largest integer that SQLite stores."""


class Fault(StrEnum):
    """Why a GPU could not be read."""

    UNREADABLE = "unreadable"
    LOST = "lost"


class ComputeMode(StrEnum):
    """How many processes the driver admits to a GPU (nvml.h, nvmlComputeMode_t)."""

    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive process"
    PROHIBITED = "prohibited"


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process that holds memory of a GPU, as the driver lists it."""

    pid: int
    memory: int | None
    """Bytes; None where the driver does not report it."""
    utilization: int | None = None
    """Percent of the last sampling period; None where it is not reported by process."""
    graphics: bool = False
    """It uses graphics only: its context does not count for the compute mode."""


@dataclass(frozen=True, slots=True)
class NeighbourLease:
    """What the personal daemon of another user leases on one GPU."""

    uid: int
    gpu: GpuUuid
    memory: int
    """Bytes, of all its jobs together."""
    pids: frozenset[int] = frozenset()
    """The processes of these jobs on the GPU, as far as that daemon knows them."""

    def unused(self, processes: Iterable[ProcessReading] | None) -> int:
        """Return the bytes that none of these processes of the GPU uses yet; None: not known.

        What a process uses is unmanaged here. If that is unknown, it counts twice, and is never
        given away.
        """
        used = sum(each.memory or 0 for each in processes or () if each.pid in self.pids)
        return max(0, self.memory - used)


@dataclass(frozen=True, slots=True)
class Link:
    """How one GPU reaches another one of its server."""

    gpu: GpuUuid
    """The other one."""
    nvlinks: int = 0
    """The NVLinks between the two, or of each of the two to the switch between them."""
    path: str | None = None
    """The way through PCI Express, in the words of `nvidia-smi topo`: one of PATHS; None: unknown.
    """

    @property
    def nearness(self) -> int:
        """The higher, the nearer through PCI Express; 0 also if unknown."""
        return PATHS.index(self.path) if self.path in PATHS else 0


PATHS = ("SYS", "NODE", "PHB", "PXB", "PIX")
"""Between sockets, between host bridges, through one host bridge, several PCIe switches, one."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of one GPU at one moment; any field but its identity may be unknown (None)."""

    uuid: GpuUuid
    index: int
    name: str
    total: int | None = None
    used: int | None = None
    """Bytes in use; if `reserved` is None, this includes the memory reserved by the driver."""
    reserved: int | None = None
    """Bytes reserved by the driver, if reported separately (NVML's memory info v2)."""
    processes: tuple[ProcessReading, ...] | None = None
    """None if the list cannot be read, unlike an empty list."""
    utilization: int | None = None
    """Percent of the last sampling period in which a kernel ran."""
    temperature: int | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts; None for a MIG device, like the limit: they are those of its GPU."""
    power_limit: float | None = None
    fault: Fault | None = None
    detail: str | None = None
    """Why the GPU cannot be read, for people."""
    minor: int | None = None
    """The number in the name of its device node; may differ from its index."""
    bus: str | None = None
    """Its PCI address, as lspci -D shows it: 0000:3b:00.0."""
    parent: GpuUuid | None = None
    """For a MIG device: its GPU, which has the same `index`."""
    mig_index: int | None = None
    """For a MIG device: its number on that GPU."""
    device_nodes: tuple[str, ...] | None = None
    """For a MIG device: the nodes it needs beside its GPU's; None if not known."""
    mig_mode: bool = False
    """It is in MIG mode: its MIG devices are leased, not the GPU itself."""
    compute_mode: ComputeMode | None = ComputeMode.DEFAULT
    """None while the driver does not answer; DEFAULT for a driver without compute modes."""
    server: str = ""
    """The machine that it is in. Only a replay has several."""
    neighbours: tuple[NeighbourLease, ...] = ()
    """What daemons of other users lease of it; always none where root's daemon leases."""
    links: tuple[Link, ...] = ()
    """To other GPUs, as far as they are known; none for a MIG device."""
    numa_node: int | None = None
    """The node whose memory is nearest; None if unknown."""
    cpus: str | None = None
    """The processors of its socket, as in 0-15,32-47; None if unknown."""

    @property
    def leased_elsewhere(self) -> int:
        """Bytes that daemons of other users have leased, and that are not in use yet."""
        return sum(each.unused(self.processes) for each in self.neighbours)

    @property
    def label(self) -> str:
        """The name shown to people: the index, for a MIG device with its number, as in 0:1."""
        if self.mig_index is None and self.uuid.startswith("MIG-"):
            # A MIG device that is gone; the database does not keep its number.
            return f"{self.index}:?"
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"


def job_title(job: int | str, slurm: int | None) -> str:
    """Return a job as people know it: by its label here, or by its number in Slurm."""
    return f"job {job}" if slurm is None else f"job {slurm} of Slurm"


EXCESS_TOLERANCE = 256 * MIB
"""Bytes above its guarantee that a job with a range keeps in any case: contexts vary as much."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One job's lease in the ledger of one GPU."""

    job: JobId
    memory: int
    """Leased bytes."""
    exclusive: bool = False
    running: bool = False
    """Its worker has been started, so part of the memory in use may belong to it."""
    used: int | None = None
    """Bytes that its processes use now; None where the driver does not report it."""
    bound: int | None = None
    """It has a range: what it uses beyond `memory`, up to this, it gives back when a job needs it.
    """

    @property
    def excess(self) -> int:
        """Bytes that it is asked to give back when a job needs them."""
        above = 0 if self.bound is None else (self.used or 0) - self.memory
        return above if above > EXCESS_TOLERANCE else 0

    @property
    def committed(self) -> int:
        """Bytes to count against the GPU: the lease, or the memory in use if that is more."""
        return max(self.memory, self.used or 0)

    @property
    def growth(self) -> int:
        """Bytes below its bound that it does not use yet."""
        return max(0, (self.bound or 0) - self.committed)


@dataclass(frozen=True)
class GpuMemory:
    """The ledger of one GPU at one moment; sizes in bytes."""

    reading: GpuReading
    allocatable: int | None
    unmanaged: int | None
    entries: tuple[LedgerEntry, ...] = ()
    unmanaged_processes: tuple[ProcessReading, ...] = ()
    """The processes on it that belong to no job with a lease on it."""
    jobs_without_lease: tuple[JobId, ...] = ()
    """The jobs of such processes: they have a lease, but on another GPU."""
    drained: str | None = None
    """Why it takes no new leases, if it is drained."""
    one_process: bool = False
    """Its compute mode admits one process at a time, and no MPS server runs on it."""
    slurm: Mapping[JobId, int] = field(default_factory=dict, compare=False)
    """The numbers in Slurm of the jobs that have one, on any GPU."""
    labels: Mapping[JobId, str] = field(default_factory=dict, compare=False)
    """The ids as people see them of elements of arrays that hold memory, on any GPU."""
    assumed: bool = False
    """The use of a job is unknown, and assumed to be its lease."""

    @property
    def uuid(self) -> GpuUuid:
        return self.reading.uuid

    @property
    def index(self) -> int:
        return self.reading.index

    @property
    def sort_key(self) -> tuple[int, int]:
        """The key by which GPUs are listed: by index, each followed by its MIG devices."""
        return self.index, -1 if self.reading.mig_index is None else self.reading.mig_index

    @property
    def leased(self) -> int:
        return sum(entry.memory for entry in self.entries)

    @cached_property
    def holders(self) -> tuple[JobId, ...]:
        """The jobs with a lease on it, lowest id first."""
        return tuple(sorted(entry.job for entry in self.entries))

    @cached_property
    def committed(self) -> int:
        return sum(entry.committed for entry in self.entries)

    @cached_property
    def headroom(self) -> int | None:
        """Bytes that may be leased now; None where they are unknown."""
        mode = self.reading.compute_mode
        if self.allocatable is None or self.unmanaged is None or mode is None:
            return None
        if any(entry.exclusive for entry in self.entries) or mode is ComputeMode.PROHIBITED:
            return 0
        if self.one_process and (self.entries or self.has_unmanaged_compute):
            return 0
        taken = self.committed + self.unmanaged + self.reading.leased_elsewhere
        return max(0, self.allocatable - taken)

    @property
    def has_unmanaged_compute(self) -> bool:
        """Whether an unmanaged process computes on it; unknown counts as yes."""
        if self.reading.processes is None:
            return bool(self.unmanaged)
        return any(not process.graphics for process in self.unmanaged_processes)

    @property
    def has_unmanaged_process(self) -> bool:
        """Whether an unmanaged process is on it; unknown counts as yes.

        Memory that no process holds (left over by the driver) does not prevent an exclusive lease.
        """
        if self.reading.processes is None:
            return bool(self.unmanaged)
        return bool(self.unmanaged_processes)

    @property
    def mode_restriction(self) -> str | None:
        """How its compute mode restricts leases, as a sentence; None if it does not."""
        if self.reading.mig_mode or self.reading.fault is not None:
            return None
        if self.reading.compute_mode is None:
            return "its compute mode cannot be read"
        if self.reading.compute_mode is ComputeMode.PROHIBITED:
            return "its compute mode is prohibited: no program can use it"
        if self.one_process:
            return "its compute mode is exclusive process: it takes one lease at a time"
        return None

    def excess_of(self, needed: int) -> tuple[LedgerEntry, ...]:
        """Return the jobs with ranges that give back at least `needed` bytes; none: too few.

        As few as are enough, and of those that started last, so that the choice stays the same.
        """
        asked = [entry for entry in self.entries if entry.excess]
        for entry in sorted(asked, key=lambda each: each.job):
            others = [each for each in asked if each is not entry]
            if sum(each.excess for each in others) >= needed:
                asked = others
        enough = sum(each.excess for each in asked) >= needed > 0
        return tuple(asked) if enough else ()

    def with_entry(self, entry: LedgerEntry) -> "GpuMemory":
        """Return this ledger with one more entry."""
        return replace(self, entries=(*self.entries, entry))


@dataclass(frozen=True, slots=True)
class UnmanagedBefore:
    """What was in use on a GPU without a lease before jobs with unknown use started there."""

    memory: int
    """Bytes; lower if less than that has been in use since."""
    now: int | None = None
    """Bytes in use without a lease by the latest reading; None: as `memory`."""
    jobs: frozenset[JobId] = frozenset()
    """The jobs that have run since."""

    def before(self, running: Collection[JobId]) -> int:
        """Return the bytes that were unmanaged before the latest of the jobs `running` started."""
        if self.now is None or self.jobs.issuperset(running):
            return self.memory
        return self.now


def unmanaged_since(gpu: GpuMemory, before: UnmanagedBefore | None) -> UnmanagedBefore | None:
    """Return what is known of the unmanaged memory after another reading; None: nothing yet.

    `gpu` was built without it, `before` is what was known. A job whose use is unknown may have
    used nothing yet, so what was in use before it started stays unmanaged. Without a reading from
    before, all memory in use may be.
    """
    used = gpu.reading.used
    if gpu.unmanaged is None or used is None:
        return before
    running = frozenset(entry.job for entry in gpu.entries if entry.running)
    if not gpu.assumed:
        return UnmanagedBefore(gpu.unmanaged, gpu.unmanaged, running)
    kept = used
    if before is not None:
        kept = min(before.before(running), used)
    return UnmanagedBefore(kept, max(gpu.unmanaged, kept), running)


def build_ledger(
    reading: GpuReading,
    entries: Iterable[LedgerEntry],
    jobs_by_pid: Mapping[int, JobId],
    margin: int = 0,
    drained: str | None = None,
    mps_servers: Collection[int] = (),
    slurm: Mapping[JobId, int] | None = None,
    labels: Mapping[JobId, str] | None = None,
    before: UnmanagedBefore | None = None,
) -> GpuMemory:
    """Return the ledger of one GPU.

    Args:
        reading: the state of the GPU.
        entries: the leases on it; their `used` is computed here.
        jobs_by_pid: the job of each process; other processes belong to no job.
        margin: bytes that are never leased.
        drained: why the GPU takes no new leases, or None.
        mps_servers: the pids of MPS servers; the driver may count memory of jobs as theirs.
        slurm: the numbers in Slurm of jobs that have one.
        labels: the ids as people see them of elements of arrays.
        before: what was unmanaged before jobs whose use is unknown.
    """
    usage = _Attribution(reading, jobs_by_pid, mps_servers)
    seen = tuple(replace(entry, used=usage.used_by(entry.job)) for entry in entries)
    allocatable = None
    if reading.fault is None and reading.total is not None:
        allocatable = max(0, reading.total - (reading.reserved or 0) - margin)
    return GpuMemory(
        reading,
        allocatable,
        _unmanaged(usage, seen, before),
        seen,
        usage.unmanaged_processes(seen),
        usage.jobs_without_lease(seen),
        drained,
        reading.compute_mode is ComputeMode.EXCLUSIVE_PROCESS and not usage.has_mps_server,
        slurm or {},
        labels or {},
        any(usage.is_assumed(entry) for entry in seen),
    )


def _unmanaged(
    usage: "_Attribution", entries: Sequence[LedgerEntry], before: UnmanagedBefore | None
) -> int | None:
    """Return the bytes in use outside leases; a job with unknown use counts with its lease.

    Memory of a process that is known to be unmanaged never counts as a job's, nor what was in use
    `before` a job whose use is unknown.
    """
    reading = usage.reading
    if reading.fault is not None or reading.used is None:
        return None
    most = reading.used if reading.total is None else reading.total
    # The driver reports the sum and the processes in two calls; either may grow in between.
    listed = sum(process.memory or 0 for process in reading.processes or ())
    used = max(reading.used, min(listed, most))
    managed = sum(usage.memory_of(entry) for entry in entries)
    others = sum(process.memory or 0 for process in usage.unmanaged_processes(entries))
    kept = 0
    if before is not None and any(usage.is_assumed(entry) for entry in entries):
        kept = before.before([entry.job for entry in entries if entry.running])
    return max(0, used - managed, min(others, most), min(kept, used))


@dataclass(frozen=True, slots=True)
class _Attribution:
    """Attributes the memory in use on one GPU to jobs, as far as the driver reports it."""

    reading: GpuReading
    jobs_by_pid: Mapping[int, JobId]
    mps_servers: Collection[int]

    @property
    def has_mps_server(self) -> bool:
        """Whether an MPS server runs that is not part of a job."""
        return any(
            process.pid in self.mps_servers and process.pid not in self.jobs_by_pid
            for process in self.reading.processes or ()
        )

    def used_by(self, job: JobId) -> int | None:
        """Return the bytes of a job's processes; None where they are unknown."""
        if self.reading.processes is None:
            return None
        own = [each for each in self.reading.processes if self.jobs_by_pid.get(each.pid) == job]
        if any(each.memory is None for each in own):
            return None
        # Only some drivers list the clients of an MPS server.
        if not own and self.has_mps_server:
            return None
        return sum(each.memory or 0 for each in own)

    def memory_of(self, entry: LedgerEntry) -> int:
        """Return the bytes to attribute to a job: its use, or its lease where that is unknown."""
        if entry.used is not None:
            return entry.used
        return entry.memory if self.may_use(entry) else 0

    def is_assumed(self, entry: LedgerEntry) -> bool:
        """Tell whether a job counts with its lease because its use is unknown."""
        return entry.used is None and self.may_use(entry)

    def may_use(self, entry: LedgerEntry) -> bool:
        """Tell whether part of the memory in use may belong to this job, whose use is unknown."""
        if self.reading.processes is None or self.has_mps_server:
            return entry.running
        return any(
            self.jobs_by_pid.get(process.pid) == entry.job for process in self.reading.processes
        )

    def unmanaged_processes(self, entries: Sequence[LedgerEntry]) -> tuple[ProcessReading, ...]:
        """Return the processes of no job in `entries`; MPS servers belong to running jobs."""
        holders = {entry.job for entry in entries}
        served = any(entry.running for entry in entries)
        return tuple(
            process
            for process in self.reading.processes or ()
            if self.jobs_by_pid.get(process.pid) not in holders
            and not (served and process.pid in self.mps_servers)
        )

    def jobs_without_lease(self, entries: Sequence[LedgerEntry]) -> tuple[JobId, ...]:
        """Return the jobs with a process here but no lease on this GPU, lowest id first."""
        found = {self.jobs_by_pid.get(each.pid) for each in self.unmanaged_processes(entries)}
        return tuple(sorted(job for job in found if job is not None))
