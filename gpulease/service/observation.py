"""One look at the machine: the GPUs, and whose the processes on them are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.plan import Snapshot
from gpulease.service.ports import Clock, GpuProbe, ProcessFinder, Store
from gpulease.service.quotas import Quotas

_READ_AGAIN = "it counts as lost if the next reading says the same"


@dataclass(frozen=True, slots=True)
class Policy:
    """What the admin decided about leasing; sizes in bytes."""

    margin: int = 0
    smallest_lease: int = 0
    """Less than this cannot hold the context of any framework."""
    bounds: Quotas = field(default_factory=Quotas)
    """What one user may have."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen at one moment."""

    readings: tuple[GpuReading, ...]
    jobs_by_pid: Mapping[int, JobId]
    at: datetime
    """When the looking began: whatever ended later may still be in it."""
    servers: frozenset[int] = frozenset()
    """The pids of MPS servers on the GPUs."""
    foreign: bool = False
    """The pids that the driver lists are not known to be those that this daemon knows."""
    withheld: frozenset[GpuUuid] = frozenset()
    """The GPUs on which jobs run and whose lists of processes were not believed for that."""
    said_lost: frozenset[GpuUuid] = frozenset()
    """The GPUs that the driver calls lost: for the first time in this look, they are unreadable."""

    @property
    def is_blind(self) -> bool:
        """Say whether memory is used that may be a job's, and nobody can tell whose it is."""
        return any(each.used for each in self.readings if each.uuid in self.withheld)

    def used_by_job(self) -> dict[tuple[JobId, GpuUuid], int]:
        """Sum the bytes that each job's processes use on each GPU, where the driver says."""
        sums: dict[tuple[JobId, GpuUuid], int] = {}
        for reading in self.readings:
            for process in reading.processes or ():
                job = self.jobs_by_pid.get(process.pid)
                if job is not None and process.memory is not None:
                    key = job, reading.uuid
                    sums[key] = sums.get(key, 0) + process.memory
        return sums

    def gpus_by_job(self) -> dict[JobId, set[GpuUuid]]:
        """Return on which GPUs each job has processes, leased or not.

        A GPU that MIG divides is left out: what it lists is on one of its MIG devices.
        """
        found: dict[JobId, set[GpuUuid]] = {}
        for reading in self.readings:
            for process in () if reading.mig_mode else reading.processes or ():
                job = self.jobs_by_pid.get(process.pid)
                if job is not None:
                    found.setdefault(job, set()).add(reading.uuid)
        return found

    def used(
        self, job: JobId, gpu: GpuUuid, sums: Mapping[tuple[JobId, GpuUuid], int]
    ) -> int | None:
        """Return the bytes that a job uses of a GPU; None where nobody can tell.

        `sums` is what `used_by_job` returns, which is worth keeping for a look.
        """
        reading = next((each for each in self.readings if each.uuid == gpu), None)
        if reading is None or reading.processes is None:
            return None
        if any(
            each.memory is None and self.jobs_by_pid.get(each.pid) == job
            for each in reading.processes
        ):
            return None
        # Where an MPS server is and the job is not listed, its memory may stand on that account.
        servers = self.servers - self.jobs_by_pid.keys()
        served = any(each.pid in servers for each in reading.processes)
        return sums.get((job, gpu), None if served else 0)

    def utilization(self, job: JobId, gpu: GpuUuid) -> int | None:
        """Return how busy a job kept a GPU, in percent; None where nobody can tell.

        Where the job cannot be told apart it is the figure of the whole GPU, which is no less.
        """
        reading = next((each for each in self.readings if each.uuid == gpu), None)
        if reading is None or not reading.utilization or not reading.processes:
            return None if reading is None else reading.utilization
        shares = {each.pid: each.utilization for each in reading.processes}
        if None in shares.values() or self.servers & shares.keys():
            return reading.utilization
        owners = {pid: self.jobs_by_pid.get(pid) for pid in shares}
        mine = [share or 0 for pid, share in shares.items() if owners[pid] == job]
        if not mine and any(share and owners[pid] is None for pid, share in shares.items()):
            # Nothing on it is known as the job's, and something that computes may yet be.
            return reading.utilization
        return min(sum(mine), 100)


def look(
    store: Store,
    probe: GpuProbe,
    processes: ProcessFinder,
    clock: Clock,
    before: Observation | None = None,
) -> Observation:
    """Read every GPU and find out whose its processes are.

    `before` is the last look. A compute mode that the driver does not tell now is as it was then,
    and a GPU is lost when the driver says so in two looks: the answer to a single call may be odd.
    """
    at = clock.now()
    read = _with_known_modes(probe.read(), before)
    said_lost = frozenset(each.uuid for each in read if each.fault is Fault.LOST)
    readings = _with_doubt(read, said_lost - (before.said_lost if before else frozenset()))
    readings += _leased_and_not_there(store, readings)
    pids = {each.pid for reading in readings for each in reading.processes or ()}
    holders = [job for job in store.live() if job.holds_memory]
    # What the driver still lists for the dead is nobody's of those who have their pids now.
    known = pids - processes.inherited(pids)
    found = processes.jobs_of(known, holders)
    if not processes.knows_pids(known, found):
        return replace(_of_foreign_pids(readings, holders, at), said_lost=said_lost)
    return Observation(readings, found, at, processes.mps_servers(known), said_lost=said_lost)


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
    """Return a look at processes of which nobody knows whose they are.

    Where jobs run it is as if the driver told no processes: one of theirs would pass for a
    stranger's, and its memory would count beside the lease. Elsewhere none can be theirs.
    """
    held = {lease.gpu for job in holders for lease in job.leases if job.ledger_entry(lease).running}
    withheld = frozenset(held & {each.uuid for each in readings})
    shown = (replace(each, processes=None) if each.uuid in held else each for each in readings)
    return Observation(tuple(shown), {}, at, foreign=True, withheld=withheld)


def _leased_and_not_there(store: Store, readings: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the GPUs that jobs hold and the driver does not show, as after a start without one.

    Their leases are kept and shown for as long as the jobs last. A GPU that cannot be read now may
    be one of them, or have them as its MIG devices: until it is read, they are not known to be
    lost.
    """
    shown = {reading.uuid for reading in readings}
    leased = {lease.gpu for job in store.live() if job.holds_memory for lease in job.leases}
    fault, detail = Fault.LOST, "the driver does not show this GPU"
    if any(reading.fault is Fault.UNREADABLE for reading in readings):
        fault, detail = Fault.UNREADABLE, f"{detail}, and there is one that cannot be read now"
    return tuple(
        replace(store.gpu(uuid), fault=fault, detail=detail) for uuid in sorted(leased - shown)
    )


def snapshot(
    jobs: Sequence[Job],
    look_: Observation,
    policy: Policy,
    drained: Mapping[GpuUuid, str],
    at: datetime,
) -> Snapshot:
    """Put together all that a decision depends on."""
    return Snapshot(
        jobs, look_.readings, at, look_.jobs_by_pid, policy.margin, drained, look_.servers
    )


@dataclass(slots=True)
class Peaks:
    """The most that each running job was seen to use on each GPU, in bytes."""

    by_lease: dict[tuple[JobId, GpuUuid], int] = field(default_factory=dict)

    def take_in(self, seen: Observation) -> None:
        """Raise the peaks to what `seen` shows."""
        for key, used in seen.used_by_job().items():
            self.by_lease[key] = max(used, self.by_lease.get(key, 0))

    def forget_all_but(self, jobs: set[JobId]) -> None:
        """Drop the jobs that are over."""
        for key in [key for key in self.by_lease if key[0] not in jobs]:
            del self.by_lease[key]
