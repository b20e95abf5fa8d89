"""How busy each job kept its GPUs."""

import asyncio
from dataclasses import replace

import pytest

from fakes import (
    NOON,
    G,
    order,
    reading,
    running_job,
)
from gpulease.domain.gpu import GpuReading, JobId, ProcessReading
from gpulease.domain.job import Job
from gpulease.service.job_samples import MeanUtilization
from gpulease.service.observation import Observation

A, B = JobId(1), JobId(2)


def running(job: JobId, *gpus: str) -> Job:
    return running_job(order().queued(job, NOON), *gpus)


def busy(uuid: str, percent: int | None, *processes: tuple[int, int | None]) -> GpuReading:
    found = tuple(ProcessReading(pid, G, utilization=share) for pid, share in processes)
    return reading(uuid, utilization=percent, processes=found)


def means(jobs: list[Job], *looks: list[GpuReading]) -> list[int | None]:
    found = MeanUtilization(lambda: jobs)
    for look in looks:
        seen = Observation(tuple(look), {1: A, 2: B}, NOON)
        asyncio.run(found.observe(seen))
    return [found.of(A), found.of(B)]


def test_it_is_the_mean_over_the_run_and_the_gpus() -> None:
    jobs = [running(A, "GPU-a", "GPU-b")]
    first = [busy("GPU-a", 80, (1, None)), busy("GPU-b", 40, (1, None))]
    second = [busy("GPU-a", 40, (1, None)), busy("GPU-b", 0, (1, None))]
    assert means(jobs, first, second) == [40, None]


@pytest.mark.parametrize(
    ("look", "shares"),
    [
        (busy("GPU-a", 90, (1, 60), (2, 20)), [60, 20]),
        (busy("GPU-a", 90, (1, None), (2, None)), [45, 45]),
        (busy("GPU-a", 90, (1, None)), [90, 0]),
        (busy("GPU-a", 90), [45, 45]),
        (busy("GPU-a", None, (1, 60), (2, 20)), [None, None]),
    ],
)
def test_jobs_share_what_is_not_known_of_each(look: GpuReading, shares: list[int | None]) -> None:
    assert means([running(A, "GPU-a"), running(B, "GPU-a")], [look]) == shares


def test_what_is_unknown_counts_for_nothing() -> None:
    jobs = [running(A, "GPU-a")]
    assert means(jobs, [busy("GPU-a", 60, (1, None))], [busy("GPU-a", None)], []) == [60, None]


def test_a_job_that_runs_again_begins_anew() -> None:
    jobs = [running(A, "GPU-a")]
    found = MeanUtilization(lambda: jobs)
    asyncio.run(found.observe(Observation((busy("GPU-a", 90, (1, None)),), {1: A}, NOON)))
    jobs[0] = replace(order().queued(A, NOON))
    asyncio.run(found.observe(Observation((), {}, NOON)))
    assert found.of(A) is None
