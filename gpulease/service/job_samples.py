"""What an observation says of each job: its memory, and the part of its GPUs that it keeps busy."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.memory_series import JobSpan, held
from gpulease.service.observation import Observation


@dataclass(slots=True)
class _Sum:
    percent: float = 0.0
    samples: int = 0


class MeanUtilization:
    """Adds up what each job keeps busy of its GPUs; an unknown value counts as no sample.

    After a restart of the daemon, the mean is that of the rest of the run.
    """

    def __init__(self, holding: Callable[[], Iterable[Job]]) -> None:
        """`holding` returns the jobs that hold memory."""
        self._holding = holding
        self._sums: dict[JobId, _Sum] = {}

    async def observe(self, seen: Observation) -> None:
        """Add a sample for each job that runs, and forget those that have ended."""
        running = [job for job in self._holding() if job.state in (State.ACTIVE, State.RELEASING)]
        leases: dict[GpuUuid, int] = {}
        for job in running:
            for lease in job.leases:
                leases[lease.gpu] = leases.get(lease.gpu, 0) + 1
        sums = {job.id: self._sums.get(job.id, _Sum()) for job in running}
        for job in running:
            for lease in job.leases:
                reading = seen.by_gpu.get(lease.gpu)
                if reading is None:
                    continue
                part = part_of(job.id, reading, seen, leases[lease.gpu])
                if part is not None:
                    sums[job.id].percent += part
                    sums[job.id].samples += 1
        self._sums = sums

    def of(self, job: JobId) -> int | None:
        """Return the mean over the run and the GPUs of a job in percent; None if unknown."""
        found = self._sums.get(job)
        return round(found.percent / found.samples) if found and found.samples else None


def part_of(job: JobId, reading: GpuReading, seen: Observation, sharing: int) -> float | None:
    """Return the part of a GPU's utilization that a job causes, in percent.

    Where the driver does not report it for each process, jobs with processes on the GPU count
    alike. Without a list of processes, all jobs with a lease do.
    """
    if reading.utilization is None:
        return None
    owners = {each.pid: seen.jobs_by_pid.get(each.pid) for each in reading.processes or ()}
    known = [(owners[each.pid], each.utilization) for each in reading.processes or ()]
    if known and all(percent is not None for _, percent in known):
        mine = sum(percent or 0 for owner, percent in known if owner == job)
        return min(100.0, mine)
    busy = set(owners.values()) - {None}
    if not busy:
        return reading.utilization / sharing
    return reading.utilization / len(busy) if job in busy else 0.0


PoolOf = Callable[[JobId, GpuUuid, Collection[int]], int | None]
"""Returns what the pools of processes of a job have in use on a GPU."""


def job_samples(
    jobs: Sequence[Job],
    gpus: Sequence[GpuMemory],
    seen: Observation,
    pool_of: PoolOf,
    seconds: int,
) -> Sequence[JobSpan]:
    """Return a sample for each lease of `jobs`, which stands for so many seconds.

    `gpus` are the ledgers of the observation.
    """
    users, at_s = {job.id: job.owner.user for job in jobs}, int(seen.at.timestamp())
    found = []
    for gpu in gpus:
        for entry in gpu.entries:
            part = part_of(entry.job, gpu.reading, seen, len(gpu.entries))
            utilization = None if part is None else round(part)
            processes = seen.processes.get((entry.job, gpu.uuid), ())
            pool = pool_of(entry.job, gpu.uuid, {each.pid for each in processes})
            figures = held((entry.used, pool, utilization), seconds)
            found.append(JobSpan(gpu.uuid, entry.job, users[entry.job], at_s, figures))
    return found
