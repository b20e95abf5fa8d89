"""The memory of GPUs and jobs over time: sampled, written, thinned, read, and deleted."""

import asyncio
import sqlite3
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    G,
    ended_job,
    order,
    reading,
    running_job,
)
from gpulease.cli.plot import about_gpu
from gpulease.daemon.housekeeping import Sampler
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, build_ledger
from gpulease.domain.job import Owner
from gpulease.domain.memory_series import JobSpan, Mean, grid_over, held
from gpulease.errors import RecordUnwritable
from gpulease.server.usage import gpu_history_view
from gpulease.service.observation import GpuObserver
from gpulease.service.ports import Event, Policy
from gpulease.service.scheduler import Scheduler
from gpulease.store.memory_history import JOB_RESOLUTIONS, MemoryHistory, MemorySeries, Sample
from gpulease.store.retention import Retention
from gpulease.store.store import SqlStore
from gpulease.web.pages import gpu_charts

T = TypeVar("T")
GPU = GpuUuid("GPU-a")
EVENT = Event(NOON, "test")
TESTS = Path(__file__).parents[1]


def start(store: SqlStore, at: datetime = NOON, owner: Owner = ALICE) -> JobId:
    with store.write() as tx:
        job = tx.add(order(owner=owner), at)
        tx.save(running_job(job, at=at), EVENT)
    return job.id


def end(store: SqlStore, job: JobId, at: datetime) -> None:
    with store.write() as tx:
        running = tx.job(job)
        assert running is not None
        tx.save(ended_job(running, at=at), EVENT)


class Sampling:
    """A sampler among a real store and fake GPUs; the job with the id N has the pid N."""

    def __init__(self, store: SqlStore) -> None:
        self.store, self.clock = store, FakeClock()
        self.gpus = FakeGpus({GPU: 8 * G})
        self.is_full = False
        self.writes = 0
        finder = FakeFinder({number: JobId(number) for number in range(1, 9)})
        observer = GpuObserver(store, self.gpus, finder, self.clock, self.call)
        scheduler = Scheduler(
            store, observer, lambda _: None, self.clock, Policy, in_writer=self.write,
            settle_exit=lambda job, _: job,
        )  # type: ignore[arg-type,return-value]  # fmt: skip
        self.pool: int | None = None
        history = MemoryHistory(store)
        self.sampler = Sampler(
            scheduler, history, self.clock, self.write, lambda _, __, pids: pids and self.pool
        )

    async def call(self, what: Callable[[], T]) -> T:
        return what()

    def write(self, what: Callable[[], T]) -> Awaitable[T]:
        self.writes += 1
        if self.is_full:
            raise RecordUnwritable("cannot write")
        return self.call(what)

    def run(self, seconds: int, used: Callable[[int], dict[int, int]] = lambda _: {}) -> None:
        """Sample each second, with what each process uses then."""
        for second in range(seconds):
            self.gpus.processes[GPU] = dict(used(second))
            asyncio.run(self.sampler.sample())
            self.clock.forward(seconds=1)

    def job(self, job: JobId, *, from_disk: bool = False) -> list[int | None]:
        held = self.store.job(job)
        assert held is not None
        grid = grid_over(held.granted_at or NOON, held.ended_at or self.clock.now(), 1000, 10)
        unwritten = ((), ()) if from_disk else self.sampler.unwritten()
        return MemorySeries(self.store, *unwritten).job(job, GPU, grid).used


@pytest.fixture
def sampling(store: SqlStore) -> Sampling:
    return Sampling(store)


def test_a_job_that_grows_has_its_largest_use_of_each_ten_seconds(sampling: Sampling) -> None:
    job = start(sampling.store)
    sampling.run(35, lambda second: {job: second * G // 10})
    grown = [second * G // 10 for second in (9, 19, 29, 34)]
    assert sampling.job(job) == grown
    asyncio.run(sampling.sampler.write_batch())
    assert sampling.job(job, from_disk=True) == [grown[0], grown[1], None, None]
    assert sampling.job(job) == grown
    asyncio.run(sampling.sampler.write())
    assert sampling.job(job, from_disk=True) == grown


def test_a_job_of_some_seconds_leaves_a_point_on_disk(sampling: Sampling) -> None:
    job = start(sampling.store)
    sampling.run(3, lambda _: {job: G})
    end(sampling.store, job, sampling.clock.now())
    sampling.run(20)
    asyncio.run(sampling.sampler.write_batch())
    assert sampling.job(job, from_disk=True) == [G]
    grid = grid_over(NOON, sampling.clock.now(), 1000)
    owners = MemorySeries(sampling.store).gpu(GPU, grid).owners
    assert [(user, used[:12]) for user, used in owners] == [("alice", [G] * 3 + [0] * 9)]


def test_pools_and_utilization_are_sampled_with_the_memory(sampling: Sampling) -> None:
    job = start(sampling.store)
    sampling.gpus.utilization[GPU] = 70
    sampling.pool = 5
    sampling.run(1, lambda _: {job: G})
    (span,) = sampling.sampler.unwritten()[1]
    assert ([each.most for each in span.figures], span.user) == ([G, 5, 70], "alice")


def test_while_the_disk_is_full_the_history_stays_in_memory(sampling: Sampling) -> None:
    job = start(sampling.store)
    sampling.is_full = True
    sampling.run(40, lambda _: {job: G})
    asyncio.run(sampling.sampler.write_batch())
    sampling.is_full = False
    assert sampling.job(job) == [G] * 4
    asyncio.run(sampling.sampler.write())
    assert sampling.job(job, from_disk=True) == [G] * 4


def test_an_idle_machine_is_written_once_a_minute(sampling: Sampling) -> None:
    sampling.run(20)
    asyncio.run(sampling.sampler.write())
    sampling.writes = 0
    for _ in range(40):
        sampling.run(15)
        asyncio.run(sampling.sampler.write_batch())
    assert 9 <= sampling.writes <= 10


def sample(at: datetime, used: int | None, **fields: int) -> Sample:
    read: GpuReading = reading(used=used, **fields)
    return Sample(at, (build_ledger(read, [], {}),))


def test_a_series_is_complete_and_has_each_peak_whatever_the_age_of_its_rows(
    store: SqlStore,
) -> None:
    history = MemoryHistory(store)
    begin, peaks = NOON, {}
    for number in range(30 * 360):
        at = begin + timedelta(seconds=10 * number)
        peaks[at] = number % 997
    samples = [sample(at, used) for at, used in peaks.items()]
    for hour in range(30):
        history.record(samples[hour * 360 : hour * 360 + 360], {})
        history.thin(begin + timedelta(hours=hour + 1))
    now = begin + timedelta(hours=30)
    series = MemorySeries(store)
    for back in (1, 2, 24, 25, 29):
        for most in (20, 300, 1000):
            grid = grid_over(now - timedelta(hours=back), now, most)
            used = series.gpu(GPU, grid).used
            last = grid.place(int(max(peaks).timestamp()))
            assert len(used) == grid.points <= most
            assert None not in used[: last + 1]
            for at, peak in peaks.items():
                if 0 <= grid.place(int(at.timestamp())) < grid.points:
                    assert (used[grid.place(int(at.timestamp()))] or 0) >= peak
            in_range = [p for at, p in peaks.items() if at.timestamp() >= grid.begin_s]
            if grid.step_s >= 900:
                assert max(filter(None, used)) == max(in_range)


BUSY_S = 5


def busy_minutes(minutes: int) -> list[Sample]:
    """Return the samples of a GPU that is busy for 5 of every 60 seconds.

    Two in a minute, of which the second holds for longer: a mean of samples would be 50%.
    """
    found = []
    for minute in range(minutes):
        at = NOON + timedelta(minutes=minute)
        found.append(sample(at, 6 * G, utilization=100, power=300))
        found.append(sample(at + timedelta(seconds=BUSY_S), 2 * G, utilization=0, power=60))
    return found


def truth(samples: Sequence[Sample], begin_s: float, end_s: float, name: str) -> float:
    """Return a mean straight from the samples, each of which holds until the next."""
    first, last = (bisect_left(samples, it, key=lambda each: each.at.timestamp())
                   for it in (begin_s, end_s))  # fmt: skip
    end = samples[-1].at + timedelta(seconds=60 - BUSY_S)
    until = [*(each.at for each in samples[first + 1 : last + 1]), end]
    held_s = [
        (getattr(each.gpus[0].reading, name), (then - each.at).total_seconds())
        for each, then in zip(samples[first:last], until, strict=False)
    ]
    return sum(value * for_s for value, for_s in held_s) / sum(for_s for _, for_s in held_s)


def history_of(store: SqlStore, samples: Sequence[Sample]) -> datetime:
    """Write samples, with old rows merged every hour, and return the instant after the last."""
    history = MemoryHistory(store)
    end = Sample(samples[-1].at + timedelta(seconds=60 - BUSY_S), samples[-1].gpus)
    for number in range(0, len(samples), 120):
        following = [*samples, end][min(number + 120, len(samples))]
        history.record(samples[number : number + 120], {}, following=following)
        history.thin(samples[number].at + timedelta(hours=1))
    return samples[-1].at + timedelta(seconds=60 - BUSY_S)


@pytest.mark.parametrize(
    "back",
    [
        timedelta(hours=1),
        timedelta(days=1),
        pytest.param(timedelta(days=8), marks=pytest.mark.slow),
    ],
)
def test_a_mean_is_that_of_the_samples_whatever_the_age_of_rows_and_the_width(
    store: SqlStore, back: timedelta
) -> None:
    samples = busy_minutes(back // timedelta(minutes=1) + 120)
    now = history_of(store, samples)
    said = set()
    for points in (15, 72, 112, 300, 1000):
        grid = grid_over(now - back, now, points)
        series = MemorySeries(store).gpu(GPU, grid)
        view = gpu_history_view(samples[0].gpus[0].reading, grid, series)
        for name in ("used", "utilization", "power"):
            mean = view.means[name]
            whole = truth(samples, grid.first_s, grid.last_s, name)
            assert mean.overall == pytest.approx(whole, abs=0.01)
            for place in range(1, grid.points - 1):
                begin_s = grid.begin_s + place * grid.step_s
                if grid.step_s % 900 == 0:
                    of_step = truth(samples, begin_s, begin_s + grid.step_s, name)
                    assert mean.values[place] == pytest.approx(of_step, abs=0.01)
        assert max(filter(None, view.utilization)) == 100, "peaks are kept beside the means"
        said.add("\n".join(about_gpu(view)))
        _, line = next(each for each in gpu_charts(view) if each.title == "Utilization").shapes
        assert (line.mean, line.most) == ("8.3%", "100%")
    (text,) = said
    assert "utilization: at most 100%, 8% on average" in text
    assert "used: at most 6G of 8G, 2.3G on average" in text


def test_the_use_of_a_user_is_averaged_over_all_of_the_time_however_it_is_merged(
    store: SqlStore,
) -> None:
    job, history = start(store), MemoryHistory(store)
    history.record(
        [sample(NOON + timedelta(seconds=30 * n), 4 * G) for n in range(240)], {},
        spans_of(job, "alice", NOON, 90, 4 * G),
    )  # fmt: skip
    for days in (0, 2, 30):
        history.thin(NOON + timedelta(hours=2, days=days))
        for points in (8, 24, 120):
            grid = grid_over(NOON, NOON + timedelta(hours=2), points)
            (mean,) = MemorySeries(store).gpu(GPU, grid).owner_means
            assert mean.overall == pytest.approx(4 * G / 8, rel=0.01)
            area = sum(filter(None, mean.values)) * grid.step_s
            assert area == pytest.approx(4 * G * 900, rel=0.01)


def test_rows_of_an_older_release_keep_their_peaks_and_have_no_mean(tmp_path: Path) -> None:
    path = tmp_path / "gpulease.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((TESTS / "data" / "0008.sql").read_text())
        connection.execute(
            "UPDATE gpu_memory SET resolution = 60, utilization = 90 WHERE resolution = 1"
        )
        connection.commit()
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema "
                  "WHERE type = 'table' AND name <> 'alembic_version'")]  # fmt: skip
        before = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    store = SqlStore(path)
    with closing(sqlite3.connect(path)) as connection:
        for name, rows in before.items():
            after = connection.execute(f"SELECT * FROM {name}").fetchall()
            assert [row[: len(old)] for row, old in zip(after, rows, strict=True)] == rows, name
    later = sample(NOON + timedelta(minutes=1), 3 * G, utilization=10)
    MemoryHistory(store).record([later, replace(later, at=later.at + timedelta(seconds=60))], {})
    grid = grid_over(NOON, NOON + timedelta(minutes=2), 2)
    series = MemorySeries(store).gpu(GPU, grid)
    assert series.utilization == [90, 10]
    assert series.means["utilization"] == Mean([None, 10.0], 10.0)
    MemoryHistory(store).thin(NOON + timedelta(days=2))
    merged = MemorySeries(store).gpu(GPU, grid_over(NOON, NOON + timedelta(minutes=15), 2))
    assert (merged.utilization[0], merged.means["utilization"].values[0]) == (90, 10.0)
    store.close()


def spans_of(job: JobId, user: str, begin: datetime, count: int, used: int) -> list[JobSpan]:
    at_s = int(begin.timestamp())
    return [
        JobSpan(GPU, job, user, at_s + 10 * number, held((used, None, None), 10))
        for number in range(count)
    ]


def test_the_use_of_a_gpu_by_owner_adds_up_jobs_at_the_same_time_only(store: SqlStore) -> None:
    later = NOON + timedelta(minutes=5)
    first, beside = start(store), start(store)
    after, bobs = start(store, later), start(store, NOON, BOB)
    samples = [sample(NOON + timedelta(seconds=10 * n), 8 * G) for n in range(60)]
    spans = spans_of(first, "alice", NOON, 30, G) + spans_of(beside, "alice", NOON, 30, 2 * G)
    spans += spans_of(after, "alice", later, 30, 2 * G) + spans_of(bobs, "bob", NOON, 60, 4 * G)
    history = MemoryHistory(store)
    history.record(samples, {}, spans)
    now = NOON + timedelta(minutes=10)

    def owners(most: int) -> dict[str | None, list[int | None]]:
        grid = grid_over(NOON, now, most)
        return dict(MemorySeries(store).gpu(GPU, grid).owners)

    assert owners(2) == {"bob": [4 * G] * 2, "alice": [3 * G, 2 * G]}
    history.thin(now + timedelta(hours=7))
    assert owners(10)["alice"] == [3 * G] * 5 + [2 * G] * 5


def test_rows_are_deleted_with_their_job(store: SqlStore) -> None:
    old = start(store, NOON - timedelta(days=400))
    young = start(store, NOON - timedelta(days=1))
    history = MemoryHistory(store)
    for job in (old, young):
        begin = NOON - timedelta(days=400 if job == old else 1)
        history.record([sample(begin, G)], {}, spans_of(job, "alice", begin, 40, G))
        end(store, job, begin + timedelta(seconds=395))
    assert jobs_with_rows(store) == {old, young}
    retention = Retention(store)
    retention.delete(retention.expired(NOON - timedelta(days=365), 100))
    assert jobs_with_rows(store) == {young}
    history.record([], {}, spans_of(old, "alice", NOON, 1, G))
    assert jobs_with_rows(store) == {young}, "it was deleted before its last span was written"


def jobs_with_rows(store: SqlStore) -> set[int]:
    with closing(sqlite3.connect(store.path)) as connection:
        return {row[0] for row in connection.execute("SELECT job FROM job_memory")}


def test_the_memory_of_jobs_is_bounded_by_age(store: SqlStore) -> None:
    job = start(store)
    history = MemoryHistory(store)
    history.record([sample(NOON, G)], {}, spans_of(job, "alice", NOON, 360, G))
    rows = []
    for keep_for in (timedelta(0), *(each.keep_for for each in JOB_RESOLUTIONS)):
        history.thin(NOON + keep_for + timedelta(hours=1, minutes=15))
        with closing(sqlite3.connect(store.path)) as connection:
            rows += connection.execute("SELECT count(*) FROM job_memory").fetchone()
    assert rows == [360, 60, 4, 0]


def test_after_the_clock_was_set_back_newer_rows_replace_older_ones(store: SqlStore) -> None:
    job = start(store)
    history = MemoryHistory(store)
    for used in (5, 3):
        history.record([sample(NOON, used)], {}, spans_of(job, "alice", NOON, 1, used))
    series, grid = MemorySeries(store), grid_over(NOON, NOON, 2, 10)
    assert (series.gpu(GPU, grid).used, series.job(job, GPU, grid).used) == ([3], [3])


def test_a_gpu_that_was_replaced_keeps_its_rows_to_itself(store: SqlStore) -> None:
    job = start(store)
    history = MemoryHistory(store)
    history.record([sample(NOON, G)], {}, spans_of(job, "alice", NOON, 1, G))
    new = replace(reading(), uuid=GpuUuid("GPU-new"))
    history.record([Sample(NOON, (build_ledger(new, [], {}),))], {})
    grid = grid_over(NOON, NOON + timedelta(seconds=10), 2)
    series = MemorySeries(store)
    assert series.gpu(GPU, grid).used == [G, G]
    assert series.gpu(new.uuid, grid).owners == []
