"""Writes that are committed together: what each call sees, and what is left when some fail."""

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    granted_job,
    hold_order,
    order,
)
from gpulease.daemon.worker_threads import WriterThread
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.health import Drain, GpuAvailability
from gpulease.domain.job import Job, worker_started
from gpulease.domain.queue_options import QueuePause
from gpulease.errors import NoSuchJob, RecordUnwritable
from gpulease.service import jobs
from gpulease.service.job_list import JobQuery
from gpulease.service.ports import Event
from gpulease.service.scheduler import follow_clock
from gpulease.store.store import SqlStore
from gpulease.store.transaction import SqlTransaction

GPU = GpuUuid("GPU-a")
EVENT = Event(NOON, "test")
CLOCK = FakeClock()


def add(store: SqlStore) -> Job:
    with store.write() as tx:
        return tx.add(order(), NOON)


def answers(store: SqlStore, *calls: Callable[[], Any]) -> list[Any]:
    """Run calls in one batch of the writing thread, and return their results or errors."""
    writer = WriterThread("writer", store.batch, longest_batch_s=60)
    free = threading.Event()

    async def all_at_once() -> list[Any]:
        waiting = [writer(each) for each in (free.wait, *calls)]
        free.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    try:
        return asyncio.run(all_at_once())[1:]
    finally:
        writer.close()


def again(store: SqlStore) -> SqlStore:
    store.close()
    return SqlStore(store.path)


def test_nothing_is_seen_before_the_commit_but_by_later_calls(store: SqlStore) -> None:
    elsewhere = SqlStore(store.path)
    first = add(store)

    def look() -> tuple[Any, ...]:
        with store.write() as tx:
            seen = tx.live()
        return seen, store.live(), elsewhere.jobs(JobQuery(ended=True)).jobs

    cancelled, (seen, committed, on_disk) = answers(
        store, lambda: jobs.cancel(store, first.id, "alice", CLOCK), look
    )
    assert seen == ()
    assert committed == (first,)
    assert on_disk == [first]
    assert store.live() == ()
    assert elsewhere.jobs(JobQuery(ended=True)).jobs == [cancelled] == [store.job(first.id)]
    elsewhere.close()


def test_a_call_that_fails_takes_back_its_own_writes_alone(store: SqlStore) -> None:
    first = add(store)

    def fail() -> None:
        with store.write() as tx:
            tx.save(jobs.cancelled(first, "bob", NOON) or first, EVENT)
            tx.set_pause(QueuePause("bob", "", NOON))
            tx.set_availability(GPU, GpuAvailability(Drain("bob", "", NOON)))
            tx.add(order(), NOON)
            raise ValueError

    def count() -> object:
        with store.write() as tx:
            return tx.user_count(ALICE.uid).waiting, tx.live(), tx.pause(), tx.drained()

    second, failed, (waiting, live, pause, drained), third = answers(
        store, lambda: add(store), fail, count, lambda: add(store)
    )
    assert isinstance(failed, ValueError)
    assert (waiting, live, pause, drained) == (2, (first, second), None, {})
    assert store.live() == (first, second, third)
    store = again(store)
    assert store.live() == (first, second, third)
    assert (store.pause(), store.drained()) == (None, {})
    store.close()


def test_an_error_after_a_write_does_not_take_it_back(store: SqlStore) -> None:
    def stored() -> None:
        add(store)
        raise NoSuchJob("no job 9")

    (failed,) = answers(store, stored)
    assert isinstance(failed, NoSuchJob)
    assert len(again(store).live()) == 1


def test_if_the_commit_fails_every_call_fails_and_nothing_is_stored(store: SqlStore) -> None:
    def orphan() -> str:
        with store.write() as tx:
            driver = tx._writer.driver
            driver.execute("PRAGMA defer_foreign_keys = ON")
            driver.execute("INSERT INTO events (job, at, kind) VALUES (99, 0, 'test')")
        return "stored"

    def refused() -> None:
        raise NoSuchJob("no job 9")

    one, two, three = answers(store, lambda: add(store), orphan, refused)
    assert isinstance(one, sqlite3.IntegrityError)
    assert isinstance(two, sqlite3.IntegrityError)
    assert isinstance(three, NoSuchJob)
    assert store.live() == ()
    assert [job.id for job in (add(store), *again(store).live())] == [1, 1]


def test_after_a_rollback_by_the_database_every_call_of_the_batch_fails(store: SqlStore) -> None:
    """SQLite does so when the disk is full; see sqlite.org/lang_transaction.html."""

    def fill() -> None:
        with store.write() as tx:
            driver = tx._writer.driver
            (pages,) = driver.execute("PRAGMA page_count").fetchone()
            driver.execute(f"PRAGMA max_page_count = {pages}")
            for _ in range(1000):
                tx.add(order(), NOON)

    found = answers(store, lambda: add(store), fill, lambda: add(store))
    assert [type(each) for each in found] == [RecordUnwritable] * 3
    assert store.live() == ()
    store._writer._presence.driver.execute("PRAGMA max_page_count = 1000000")
    (stored,) = answers(store, lambda: add(store))
    assert store.live() == again(store).live() == (stored,)


def test_a_clock_that_was_set_is_followed_after_the_commit(store: SqlStore) -> None:
    job, seen = add(store), []

    class Clock(FakeClock):
        def set_by(self) -> timedelta:
            return timedelta(hours=1)

        def follow(self, by: timedelta) -> None:
            seen.append(store.live())

    answers(store, lambda: follow_clock(store, Clock()))
    assert seen[0][0].submitted_at == job.submitted_at + timedelta(hours=1)


def test_a_call_that_nobody_waits_for_any_more_is_not_made(store: SqlStore) -> None:
    writer = WriterThread("writer", store.batch)
    free = threading.Event()

    async def give_up() -> None:
        busy = writer(free.wait)
        call = writer(lambda: add(store))
        asyncio.ensure_future(call).cancel()
        free.set()
        await busy

    asyncio.run(give_up())
    writer.close()
    assert store.live() == ()


def step(tx: SqlTransaction, chance: random.Random) -> None:
    live = tx.live()
    job = chance.choice(live) if live else None
    if job is None or chance.random() < 0.4:
        tx.add(chance.choice([order(), hold_order(), order(owner=BOB)]), NOON)
    elif chance.random() < 0.3:
        tx.save(jobs.cancelled(job, "alice", NOON) or job, EVENT)
    elif job.started_at is not None:
        tx.note_over(job.id, GPU, timedelta(seconds=chance.randrange(9)))
    elif job.holds_memory:
        tx.save(worker_started(job, 10, 9, NOON) or job, EVENT)
    else:
        tx.save(granted_job(job), EVENT)


@pytest.mark.parametrize("seed", range(8))
def test_memory_and_the_disk_agree_after_any_batches(store: SqlStore, seed: int) -> None:
    chance = random.Random(seed)

    def call() -> None:
        with store.write() as tx:
            for _ in range(chance.randrange(6)):
                step(tx, chance)
            if chance.random() < 0.3:
                raise ValueError

    for _ in range(5):
        answers(store, *[call] * chance.randrange(1, 6))
    counts, live = counted(store), store.live()
    assert [job.id for job in live] == sorted(job.id for job in live)
    store = again(store)
    assert (counted(store), store.live()) == (counts, live)
    store.close()


def counted(store: SqlStore) -> list[object]:
    with store.write() as tx:
        return [tx.live(), *(tx.user_count(owner.uid) for owner in (ALICE, BOB))]


def test_a_lost_job_that_is_restored_has_its_place(store: SqlStore) -> None:
    first, second = add(store), add(store)
    with store.write() as tx:
        gone = jobs.cancelled(first, "alice", NOON)
        assert gone is not None
        tx.save(gone, EVENT)
    driver = sqlite3.connect(store.path)
    for table in ("events", "jobs"):
        column = "id" if table == "jobs" else "job"
        driver.execute(f"DELETE FROM {table} WHERE {column} = {JobId(1)}")
    driver.commit()
    driver.close()
    store = again(store)
    with store.write() as tx:
        tx.restore(first, EVENT)
        assert tx.live() == (first, second)
    assert store.live() == (first, second)
    store.close()
