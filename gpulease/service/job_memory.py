"""Samples of the memory of jobs, from an observation and the reports of frameworks."""

from collections.abc import Callable, Collection, Mapping, Sequence

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.memory_series import JobSpan, held
from gpulease.service.observation import Observation
from gpulease.service.utilization import part_of

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
    users = {job.id: job.owner.user for job in jobs}
    return [each for gpu in gpus for each in _on(gpu, users, seen, pool_of, seconds)]


def _on(
    gpu: GpuMemory,
    users: Mapping[JobId, str],
    seen: Observation,
    pool_of: PoolOf,
    seconds: int,
) -> Sequence[JobSpan]:
    reading, at_s = gpu.reading, int(seen.at.timestamp())
    pids: dict[JobId, set[int]] = {}
    for process in reading.processes or ():
        if (job := seen.jobs_by_pid.get(process.pid)) is not None:
            pids.setdefault(job, set()).add(process.pid)
    found = []
    for entry in gpu.entries:
        part = part_of(entry.job, reading, seen, len(gpu.entries))
        utilization = None if part is None else round(part)
        pool = pool_of(entry.job, gpu.uuid, pids.get(entry.job, ()))
        figures = held((entry.used, pool, utilization), seconds)
        found.append(JobSpan(gpu.uuid, entry.job, users[entry.job], at_s, figures))
    return found
