"""What one look at the GPUs says, and how busy each job kept its GPUs."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from fakes import (
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    G,
    MemoryStore,
    order,
    reading,
    running_job,
)
from gpulease.domain.gpu import ComputeMode, Fault, GpuReading, GpuUuid, JobId, ProcessReading
from gpulease.domain.job import Job
from gpulease.domain.snapshot import ledgers
from gpulease.service.job_samples import MeanUtilization
from gpulease.service.observation import Observation, observe, snapshot
from gpulease.service.ports import Policy

GPU = GpuUuid("GPU-a")
MINE, OTHER = JobId(1), JobId(2)
MY_PIDS, OTHERS_PID, STRANGER, SERVER = (11, 12), 21, 99, 77
OWNERS = dict.fromkeys(MY_PIDS, MINE) | {OTHERS_PID: OTHER}


def busy(whole: int | None, shares: dict[int, int | None] | None) -> int | None:
    """Return how busy the look says that job 1 is."""
    listed = shares and tuple(ProcessReading(pid, 1, share) for pid, share in shares.items())
    reading = GpuReading(GPU, 0, "card", utilization=whole, processes=listed)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Observation((reading,), OWNERS, at, frozenset({SERVER})).utilization(MINE, GPU)


@pytest.mark.parametrize(
    ("whole", "shares", "expected"),
    [
        pytest.param(90, {11: 30, 12: 20, 21: 40}, 50, id="what its processes do"),
        pytest.param(90, {11: 0, 21: 90}, 0, id="nothing, beside one that computes"),
        pytest.param(90, {21: 90}, 0, id="not there, beside one that computes"),
        pytest.param(90, {99: 90}, 90, id="not there, and a stranger may be its"),
        pytest.param(90, {99: 0, 21: 90}, 0, id="not there, and the stranger does nothing"),
        pytest.param(90, {11: 0, 99: 90}, 0, id="a stranger beside its own"),
        pytest.param(90, {11: None, 21: None}, 90, id="not told apart"),
        pytest.param(90, {11: 0, 77: 90}, 90, id="an MPS server computes for everybody"),
        pytest.param(90, None, 90, id="no list"),
        pytest.param(0, {11: None}, 0, id="nothing computes at all"),
        pytest.param(None, {11: 0}, None, id="unknown"),
        pytest.param(100, {11: 90, 12: 90}, 100, id="never more than all of the time"),
    ],
)
def test_a_job_is_as_busy_as_its_processes_where_they_are_told_apart(
    whole: int | None, shares: dict[int, int | None] | None, expected: int | None
) -> None:
    assert busy(whole, shares) == expected


def test_a_compute_mode_that_nobody_tells_now_is_the_last_known_one() -> None:
    gpus, seen = FakeGpus({"GPU-a": 8 * G}), None
    told: tuple[dict[str, object], ...] = (
        {"compute_mode": None},
        {"compute_mode": ComputeMode.PROHIBITED},
        {"compute_mode": None},
        {"fault": Fault.UNREADABLE},
        {"compute_mode": None},
        {"compute_mode": ComputeMode.DEFAULT},
    )
    modes = []
    for fields in told:
        gpus.broken["GPU-a"] = reading(**fields)
        seen = observe(MemoryStore(), gpus, FakeFinder(), FakeClock(), seen)
        modes.append(seen.readings[0].compute_mode)

    prohibited = ComputeMode.PROHIBITED
    assert modes == [None, *[prohibited] * 4, ComputeMode.DEFAULT]


def test_a_gpu_is_lost_when_the_driver_says_so_twice_in_a_row() -> None:
    gpus, seen = FakeGpus({"GPU-a": 8 * G}), None
    faults = []
    for lost in (True, False, True, True, True, False, True):
        gpus.broken = {"GPU-a": reading(fault=Fault.LOST, detail="GPU is lost")} if lost else {}
        seen = observe(MemoryStore(), gpus, FakeFinder(), FakeClock(), seen)
        faults.append(seen.readings[0].fault)
        (ledger,) = ledgers(snapshot((), seen, Policy(), {}, seen.at))
        assert (ledger.headroom is None) is lost, "it takes no lease meanwhile"

    doubt, is_lost = Fault.UNREADABLE, Fault.LOST
    assert faults == [doubt, None, doubt, is_lost, is_lost, None, doubt]


# Over a run.


A, B = JobId(1), JobId(2)


def holding(job: JobId, *gpus: str) -> Job:
    return running_job(order().queued(job, NOON), *gpus)


def kept_busy(uuid: str, percent: int | None, *processes: tuple[int, int | None]) -> GpuReading:
    found = tuple(ProcessReading(pid, G, utilization=share) for pid, share in processes)
    return reading(uuid, utilization=percent, processes=found)


def means(jobs: list[Job], *looks: list[GpuReading]) -> list[int | None]:
    found = MeanUtilization(lambda: jobs)
    for look in looks:
        seen = Observation(tuple(look), {1: A, 2: B}, NOON)
        asyncio.run(found.observe(seen))
    return [found.of(A), found.of(B)]


def test_it_is_the_mean_over_the_run_and_the_gpus() -> None:
    jobs = [holding(A, "GPU-a", "GPU-b")]
    first = [kept_busy("GPU-a", 80, (1, None)), kept_busy("GPU-b", 40, (1, None))]
    second = [kept_busy("GPU-a", 40, (1, None)), kept_busy("GPU-b", 0, (1, None))]
    assert means(jobs, first, second) == [40, None]


@pytest.mark.parametrize(
    ("look", "shares"),
    [
        (kept_busy("GPU-a", 90, (1, 60), (2, 20)), [60, 20]),
        (kept_busy("GPU-a", 90, (1, None), (2, None)), [45, 45]),
        (kept_busy("GPU-a", 90, (1, None)), [90, 0]),
        (kept_busy("GPU-a", 90), [45, 45]),
        (kept_busy("GPU-a", None, (1, 60), (2, 20)), [None, None]),
    ],
)
def test_jobs_share_what_is_not_known_of_each(look: GpuReading, shares: list[int | None]) -> None:
    assert means([holding(A, "GPU-a"), holding(B, "GPU-a")], [look]) == shares


def test_what_is_unknown_counts_for_nothing() -> None:
    jobs = [holding(A, "GPU-a")]
    assert means(jobs, [kept_busy("GPU-a", 60, (1, None))], [kept_busy("GPU-a", None)], []) == [
        60,
        None,
    ]


def test_a_job_that_runs_again_begins_anew() -> None:
    jobs = [holding(A, "GPU-a")]
    found = MeanUtilization(lambda: jobs)
    asyncio.run(found.observe(Observation((kept_busy("GPU-a", 90, (1, None)),), {1: A}, NOON)))
    jobs[0] = replace(order().queued(A, NOON))
    asyncio.run(found.observe(Observation((), {}, NOON)))
    assert found.of(A) is None
