"""Observations of the machine: the GPUs, and the jobs that their processes belong to."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property

from gpulease.domain.gpu import (
    Fault,
    GpuReading,
    GpuUuid,
    JobId,
    ProcessReading,
    UnmanagedBefore,
    unmanaged_since,
)
from gpulease.domain.host_memory import HostReading
from gpulease.domain.job import Job
from gpulease.domain.lease import Lease
from gpulease.domain.snapshot import Snapshot, ledgers
from gpulease.service.ports import (
    Clock,
    GpuProbe,
    HostProbe,
    InThread,
    Policy,
    ProcessFinder,
    Store,
)
from gpulease.service.sharing import Sharing
from gpulease.shared_calls import SharedCalls

_READ_AGAIN = "it counts as lost if the next reading says the same"


@dataclass(frozen=True)
class Observation:
    """The state of the GPUs and their processes at one moment."""

    readings: tuple[GpuReading, ...]
    jobs_by_pid: Mapping[int, JobId]
    at: datetime
    """When the observation began: a process that ended later may still be in it."""
    servers: frozenset[int] = frozenset()
    """The pids of MPS servers on the GPUs."""
    programs: Mapping[int, Hashable] = field(default_factory=dict)
    """As in `ListedProcesses`."""
    foreign: bool = False
    """The pids that the driver lists may belong to another pid namespace."""
    withheld: frozenset[GpuUuid] = frozenset()
    """The GPUs with jobs, whose lists of processes were dropped because their pids are foreign."""
    said_lost: frozenset[GpuUuid] = frozenset()
    """The GPUs that the driver calls lost. In the first such observation they are unreadable."""
    unmanaged: Mapping[GpuUuid, UnmanagedBefore] = field(default_factory=dict)
    """What was unmanaged before jobs whose use is unknown."""
    host: HostReading | None = None
    """The RAM and the cores of the machine; None: not read."""

    @property
    def is_blind(self) -> bool:
        """Whether memory is in use that may belong to a job, but cannot be attributed."""
        return any(each.used for each in self.readings if each.uuid in self.withheld)

    @cached_property
    def by_gpu(self) -> Mapping[GpuUuid, GpuReading]:
        """The readings."""
        return {each.uuid: each for each in self.readings}

    @cached_property
    def processes(self) -> Mapping[tuple[JobId, GpuUuid], Sequence[ProcessReading]]:
        """The processes of each job on each GPU, leased or not, as far as they are known."""
        found: dict[tuple[JobId, GpuUuid], list[ProcessReading]] = {}
        for reading in self.readings:
            for process in reading.processes or ():
                job = self.jobs_by_pid.get(process.pid)
                if job is not None:
                    found.setdefault((job, reading.uuid), []).append(process)
        return found

    def users(self, job: JobId, gpu: GpuUuid) -> frozenset[int]:
        """Return the processes of a job that compute on a GPU, as far as they are known."""
        processes = self.processes.get((job, gpu), ())
        return frozenset(each.pid for each in processes if not each.graphics)

    def used(self, job: JobId, gpu: GpuUuid) -> int | None:
        """Return the bytes that a job uses of a GPU; None if unknown."""
        reading = self.by_gpu.get(gpu)
        if reading is None or reading.processes is None:
            return None
        memory = [each.memory for each in self.processes.get((job, gpu), ())]
        if None in memory:
            return None
        # The driver may report memory of an unlisted job as memory of an MPS server.
        servers = self.servers - self.jobs_by_pid.keys()
        if not memory and any(each.pid in servers for each in reading.processes):
            return None
        return sum(filter(None, memory))

    def utilization(self, job: JobId, gpu: GpuUuid) -> int | None:
        """Return how busy a job kept a GPU, in percent; None if unknown.

        Where the share of the job is unknown, return that of the whole GPU, an upper bound.
        """
        reading = self.by_gpu.get(gpu)
        if reading is None or not reading.utilization or not reading.processes:
            return None if reading is None else reading.utilization
        shares = {each.pid: each.utilization for each in reading.processes}
        if None in shares.values() or self.servers & shares.keys():
            return reading.utilization
        owners = {pid: self.jobs_by_pid.get(pid) for pid in shares}
        mine = [share or 0 for pid, share in shares.items() if owners[pid] == job]
        if not mine and any(share and owners[pid] is None for pid, share in shares.items()):
            # None of the processes is known to be the job's, but an unknown busy one may be.
            return reading.utilization
        return min(sum(mine), 100)


def observe(
    store: Store,
    probe: GpuProbe,
    processes: ProcessFinder,
    clock: Clock,
    before: Observation | None = None,
    unmanaged: Mapping[GpuUuid, UnmanagedBefore] | None = None,
) -> Observation:
    """Read every GPU, and find the jobs that its processes belong to.

    `before` is the previous observation; without one, `unmanaged` is what an earlier daemon found
    in use without a lease. A compute mode that cannot be read now is taken from it.
    A GPU counts as lost when the driver says so twice in a row: a single answer may be wrong.
    """
    at = clock.now()
    read = _with_known_modes(probe.read(), before)
    said_lost = frozenset(each.uuid for each in read if each.fault is Fault.LOST)
    readings = _with_doubt(read, said_lost - (before.said_lost if before else frozenset()))
    holders = store.holding()
    readings += _leased_but_missing(store, holders, readings)
    pids = {each.pid for reading in readings for each in reading.processes or ()}
    listed = processes.listed(pids, holders)
    if listed is None:
        seen = _of_foreign_pids(readings, holders, at)
    else:
        seen = Observation(readings, listed.jobs, at, listed.servers, programs=listed.programs)
    known_before = before.unmanaged if before else unmanaged or {}
    return replace(seen, said_lost=said_lost, unmanaged=_unmanaged(seen, holders, known_before))


def _unmanaged(
    seen: Observation, holders: Sequence[Job], before: Mapping[GpuUuid, UnmanagedBefore]
) -> Mapping[GpuUuid, UnmanagedBefore]:
    """Return what was in use on each GPU before the jobs whose use is unknown."""
    bare = Snapshot(holders, seen.readings, seen.at, seen.jobs_by_pid, mps_servers=seen.servers)
    found = ((gpu.uuid, unmanaged_since(gpu, before.get(gpu.uuid))) for gpu in ledgers(bare))
    return {uuid: each for uuid, each in found if each is not None}


def _with_known_modes(
    readings: Sequence[GpuReading], before: Observation | None
) -> tuple[GpuReading, ...]:
    known = {each.uuid: each.compute_mode for each in before.readings} if before else {}
    return tuple(
        replace(each, compute_mode=known.get(each.uuid))
        if each.compute_mode is None or each.fault is not None
        else each
        for each in readings
    )


def _with_doubt(
    readings: Sequence[GpuReading], doubted: frozenset[GpuUuid]
) -> tuple[GpuReading, ...]:
    return tuple(
        replace(each, fault=Fault.UNREADABLE, detail=f"{each.detail or 'lost'}; {_READ_AGAIN}")
        if each.uuid in doubted
        else each
        for each in readings
    )


def _of_foreign_pids(
    readings: Sequence[GpuReading], holders: Sequence[Job], at: datetime
) -> Observation:
    """Return an observation of processes that cannot be attributed to jobs.

    On GPUs with jobs the list of processes is dropped: a job's own process would count as
    unmanaged, in addition to its lease. On other GPUs no process can belong to a job.
    """
    held = {lease.gpu for job in holders for lease in job.leases if job.ledger_entry(lease).running}
    withheld = frozenset(held & {each.uuid for each in readings})
    shown = (replace(each, processes=None) if each.uuid in held else each for each in readings)
    return Observation(tuple(shown), {}, at, foreign=True, withheld=withheld)


def _leased_but_missing(
    store: Store, holders: Sequence[Job], readings: Sequence[GpuReading]
) -> tuple[GpuReading, ...]:
    """Return the GPUs that jobs hold but the driver does not list, for example after a restart.

    Their leases are kept and shown until the jobs end. While any GPU is unreadable, a missing one
    may be that GPU, or a MIG device of it, so it counts as unreadable too and not as lost.
    """
    shown = {reading.uuid for reading in readings}
    leased = {lease.gpu for job in holders for lease in job.leases}
    fault, detail = Fault.LOST, "the driver does not list this GPU"
    if any(reading.fault is Fault.UNREADABLE for reading in readings):
        fault, detail = Fault.UNREADABLE, f"{detail}, and another one cannot be read"
    return tuple(
        replace(store.gpu(uuid), fault=fault, detail=detail) for uuid in sorted(leased - shown)
    )


def snapshot(
    jobs: Sequence[Job],
    seen: Observation,
    policy: Policy,
    drained: Mapping[GpuUuid, str],
    at: datetime,
) -> Snapshot:
    """Return everything that a decision depends on."""
    return Snapshot(
        jobs, seen.readings, at, seen.jobs_by_pid, policy.margin, drained, seen.servers,
        unmanaged=seen.unmanaged, host=seen.host, host_policy=policy.host,
    )  # fmt: skip


@dataclass(slots=True)
class Peaks:
    """The highest use of each GPU by each running job so far, in bytes."""

    by_lease: dict[tuple[JobId, GpuUuid], int] = field(default_factory=dict)

    def update(self, seen: Observation) -> None:
        """Raise the peaks to the use in `seen`."""
        for key, processes in seen.processes.items():
            known = [each.memory for each in processes if each.memory is not None]
            if known:
                self.by_lease[key] = max(sum(known), self.by_lease.get(key, 0))

    def of(self, job: JobId, lease: Lease) -> int | None:
        """Return the peak of a lease, also of before a restart; None if no use was seen."""
        now = self.by_lease.get((job, lease.gpu))
        return max(filter(None, (now, lease.peak)), default=now)

    def keep_only(self, jobs: set[JobId]) -> None:
        """Forget all other jobs."""
        for key in [key for key in self.by_lease if key[0] not in jobs]:
            del self.by_lease[key]


class GpuObserver:
    """Takes observations, and keeps the latest one and the peaks."""

    def __init__(
        self,
        store: Store,
        probe: GpuProbe,
        processes: ProcessFinder,
        clock: Clock,
        in_thread: InThread,
        unmanaged: Mapping[GpuUuid, UnmanagedBefore] | None = None,
        sharing: Sharing | None = None,
        host: HostProbe | None = None,
    ) -> None:
        """`in_thread` runs the calls of the driver; `unmanaged` is as in `observe`.

        `sharing` is for daemons of several users on the same GPUs. Without `host`, nothing is known
        of the machine's RAM.
        """
        self._host = host
        self.sharing = sharing
        self._unmanaged = unmanaged
        self.latest: Observation | None = None
        self.peaks = Peaks()
        self._store = store
        self._probe = probe
        self._processes = processes
        self._clock = clock
        self._in_thread = in_thread
        self._shared = SharedCalls()

    @property
    def is_blind(self) -> bool:
        """Whether the latest observation cannot attribute memory that may belong to a job."""
        return self.latest is not None and self.latest.is_blind

    def readings(self) -> Mapping[GpuUuid, GpuReading]:
        """Return the latest reading of each GPU."""
        return self.latest.by_gpu if self.latest else {}

    async def recent(self) -> Observation:
        """Return the latest observation, or take the first."""
        return self.latest if self.latest is not None else await self.observe()

    async def observe(self) -> Observation:
        """Take an observation that begins after this call.

        Callers that arrive during an observation share the next one.
        """
        return await self._shared(self._observe)

    async def _observe(self) -> Observation:
        def look() -> Observation:
            seen = observe(
                self._store,
                self._probe,
                self._processes,
                self._clock,
                self.latest,
                self._unmanaged,
            )
            if self._host is not None:
                seen = replace(seen, host=self._host.read(self._store.holding()))
            if self.sharing is None:
                return seen
            return replace(seen, readings=self.sharing.joined(seen.readings, seen.processes))

        seen = await self._in_thread(look)
        self.latest = seen
        self.peaks.update(seen)
        return seen
