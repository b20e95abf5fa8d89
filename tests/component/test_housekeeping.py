"""What is kept of ended jobs: output within a size, records within an age and a number."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest

from fakes import ALICE, BOB, NOON, FakeClock, order
from gpulease.config import Settings
from gpulease.daemon.job_output import KeptOutput, StateCleaner, over_limit
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Outcome, Owner, asked_to_end
from gpulease.domain.lease import Trigger
from gpulease.host.state_dir import StateDirectory
from gpulease.service.job_list import JobQuery
from gpulease.service.ports import Event
from gpulease.store.retention import Retention
from gpulease.store.store import SqlStore
from gpulease.units import Share

NONE = timedelta(0)


def ended(store: SqlStore, owner: Owner, days_ago: int) -> JobId:
    """Return a job that was cancelled so many days before noon."""
    at = NOON - timedelta(days=days_ago)
    with store.write() as tx:
        job = tx.add(order(owner=owner), at)
        over = asked_to_end(job, Trigger.CANCEL, Outcome.CANCELLED, "cancelled", at)
        assert over is not None
        tx.save(over, Event(at, Trigger.CANCEL))
    return job.id


def forgotten(store: SqlStore, border_days: int, most: int) -> None:
    pruning = Retention(store)
    while over := pruning.expired(NOON - timedelta(days=border_days), most):
        pruning.delete(over)


def left(store: SqlStore) -> list[JobId]:
    return [job.id for job in store.jobs(JobQuery(ended=True)).jobs]


def test_what_ended_long_ago_is_forgotten_with_its_events_and_nothing_else_is(
    store: SqlStore,
) -> None:
    old, young = ended(store, ALICE, 400), ended(store, ALICE, 300)
    with store.write() as tx:
        waiting = tx.add(order(), NOON - timedelta(days=500)).id
    forgotten(store, 365, most=100)
    assert left(store) == [young, waiting]
    assert not store.events(old)
    assert store.events(young)
    with store.write() as tx:
        assert tx.add(order(), NOON).id > waiting, "no id is used twice"


def test_of_each_user_the_newest_ended_jobs_stay(store: SqlStore) -> None:
    alices = [ended(store, ALICE, 5) for _ in range(5)]
    bobs = [ended(store, BOB, 9) for _ in range(2)]
    forgotten(store, 365, most=2)
    assert left(store) == alices[3:] + bobs


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    made = StateDirectory(tmp_path / "state")
    yield made
    made.close()


def with_output(state: StateDirectory, *jobs: JobId) -> None:
    for job in jobs:
        state.job(job).mkdir()
        (state.job(job) / "stdout").write_bytes(b"x" * 8192)


def kept_output(state: StateDirectory) -> list[int]:
    return sorted(int(each.name) for each in state.jobs.iterdir())


async def at_once(call: Callable[[], object]) -> object:
    return call()


@pytest.mark.parametrize("most", [0, Share(Fraction(10))])
def test_while_the_state_directory_is_away_no_output_is_removed(
    store: SqlStore, state: StateDirectory, most: int | Share
) -> None:
    with_output(state, gone := ended(store, ALICE, 5))
    settings = Settings(most_output=most, keep_output_for=NONE)
    cleaner = StateCleaner(state, store, lambda: settings, FakeClock(), at_once)
    kept = state.path.rename(state.path.with_name("elsewhere"))

    asyncio.run(cleaner.limit_output())
    asyncio.run(cleaner.remove_old())

    kept.rename(state.path)
    assert kept_output(state) == [gone]


@pytest.mark.parametrize("settings", [Settings(most_output=0), Settings(keep_output_for=NONE)])
def test_the_output_of_a_job_that_has_not_ended_stays_however_much_and_old_it_is(
    store: SqlStore, state: StateDirectory, settings: Settings
) -> None:
    gone = ended(store, ALICE, 5)
    with store.write() as tx:
        waiting = tx.add(order(), NOON - timedelta(days=500)).id
    with_output(state, gone, waiting)
    cleaner = StateCleaner(state, store, lambda: settings, FakeClock(), at_once)

    asyncio.run(cleaner.limit_output())
    asyncio.run(cleaner.remove_old())

    assert kept_output(state) == [waiting]
    assert left(store) == [gone, waiting], "the record of both is kept longer"


def test_the_oldest_output_goes_first_of_whoever_keeps_the_most() -> None:
    theirs = [KeptOutput(JobId(n), 1, NOON, 10) for n in (2, 3, 4)]
    kept = [*theirs, KeptOutput(JobId(1), 2, NOON, 10)]
    assert [each.job for each in over_limit(kept, 40)] == []
    assert [each.job for each in over_limit(kept, 25)] == [2, 3]
    assert {each.job for each in over_limit(kept, 0)} == {1, 2, 3, 4}
