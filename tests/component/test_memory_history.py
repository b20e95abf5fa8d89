"""The memory of GPUs and jobs over time: sampled, written, thinned, read, and deleted."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from fakes import ALICE, BOB, NOON, FakeClock, FakeFinder, FakeGpus, G, order, reading
from gpulease.daemon.housekeeping import Sampler
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, build_ledger
from gpulease.domain.job import Exit, Outcome, Owner, grant, worker_gone, worker_started
from gpulease.domain.lease import Trigger
from gpulease.domain.memory_series import JobSpan, grid_over, held
from gpulease.domain.placement import Placement
from gpulease.errors import RecordUnwritable
from gpulease.service.observation import GpuObserver
from gpulease.service.ports import Event, Policy
from gpulease.service.scheduler import Scheduler
from gpulease.store.memory_history import JOB_RESOLUTIONS, MemoryHistory, Sample
from gpulease.store.memory_series import MemorySeries
from gpulease.store.recovery import is_sound, rebuild
from gpulease.store.retention import Retention
from gpulease.store.salvage import salvage
from gpulease.store.store import SqlStore

T = TypeVar("T")
GPU = GpuUuid("GPU-a")
EVENT = Event(NOON, "test")
TESTS = Path(__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus([reading()], NOON)
    yield opened
    opened.close()


def start(store: SqlStore, at: datetime = NOON, owner: Owner = ALICE) -> JobId:
    with store.write() as tx:
        job = grant(tx.add(order(owner=owner), at), Placement(((GPU, G),)), at)
        running = worker_started(job, 1, 2, at)
        assert running is not None
        tx.save(running, EVENT)
    return job.id


def end(store: SqlStore, job: JobId, at: datetime) -> None:
    with store.write() as tx:
        running = tx.job(job)
        assert running is not None
        ended = worker_gone(running, Trigger.WORKER_EXITED, Outcome.EXITED, None, Exit(0), at)
        assert ended is not None
        tx.save(ended, EVENT)


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


def test_a_job_has_a_point_as_soon_as_it_has_started(sampling: Sampling) -> None:
    job = start(sampling.store)
    sampling.run(3, lambda _: {job: G})
    assert sampling.job(job) == [G]


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
    assert sampling.writes == 10


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


def test_temperature_and_power_are_kept(store: SqlStore) -> None:
    MemoryHistory(store).record([sample(NOON, 5, temperature=61, power=287)], {})
    MemoryHistory(store).thin(NOON + timedelta(days=2))
    found = MemorySeries(store).gpu(GPU, grid_over(NOON, NOON + timedelta(minutes=15), 2))
    assert (found.temperature[0], found.power[0], found.leased[0]) == (61, 287, 0)


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


@pytest.mark.parametrize("days", [0, 1, 30])
def test_rows_are_deleted_with_their_job_whatever_their_age(store: SqlStore, days: int) -> None:
    job = start(store)
    history = MemoryHistory(store)
    history.record([sample(NOON, G)], {}, spans_of(job, "alice", NOON, 40, G))
    end(store, job, NOON + timedelta(seconds=395))
    history.thin(NOON + timedelta(days=days))
    assert jobs_with_rows(store) == {job}
    Retention(store).delete([job])
    assert jobs_with_rows(store) == set()


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


def test_a_recovered_database_has_the_memory_of_its_jobs_and_of_no_other(
    store: SqlStore, tmp_path: Path
) -> None:
    job = start(store)
    MemoryHistory(store).record([sample(NOON, G)], {}, spans_of(job, "alice", NOON, 5, G))
    store.close()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("INSERT INTO job_memory (gpu, resolution, at, job) VALUES (1, 10, 0, 99)")
        connection.execute("INSERT INTO job_memory (gpu, resolution, at, job) VALUES (7, 10, 0, ?)", (job,))
        connection.commit()
    (tmp_path / "scratch").mkdir()
    found = salvage(store.path, tmp_path / "scratch", None)
    counts = rebuild(tmp_path / "new.db", found, [])
    assert is_sound(tmp_path / "new.db")
    assert (counts.saved["job_memory"], counts.dropped["job_memory"]) == (7, 2)
    again = SqlStore(tmp_path / "new.db")
    grid = grid_over(NOON, NOON + timedelta(seconds=50), 10, 10)
    assert MemorySeries(again).job(job, GPU, grid).used == [G] * 5
    again.close()


def test_the_history_of_an_older_release_continues(tmp_path: Path) -> None:
    path = tmp_path / "gpulease.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((TESTS / "data" / "0007.sql").read_text())
    store = SqlStore(path)
    job = next(job.id for job in store.live() if job.leases)
    later = sample(NOON + timedelta(seconds=10), 3 * G)
    spans = spans_of(job, "alice", NOON, 2, G)
    MemoryHistory(store).record([later], {}, spans)
    found = MemorySeries(store).gpu(GPU, grid_over(NOON, NOON + timedelta(seconds=20), 2))
    assert (found.used, found.leased) == ([G, 3 * G], [None, 0])
    assert found.owners == [("alice", [G, G])]
    store.close()


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
