"""Past jobs in the database: pages of them, and how long they waited."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes import ALICE, NOON, order, reading
from gpulease.domain.job import Exit, Job, Outcome, grant, worker_gone, worker_started
from gpulease.domain.lease import State, Trigger
from gpulease.domain.placement import Placement
from gpulease.server.job_queries import JobQuery
from gpulease.service.ports import Event
from gpulease.store.store import SqlStore
from gpulease.store.usage import UsageTotals
from gpulease.units import GIB

EVENT = Event(NOON, "test")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus([reading()], NOON)
    yield opened
    opened.close()


def ran(store: SqlStore, submitted: datetime, waited: timedelta) -> Job:
    """Return a job that waited and ran for an hour."""
    granted = submitted + waited
    with store.write() as tx:
        job = grant(tx.add(order(), submitted), Placement(((reading().uuid, GIB),)), granted)
        started = worker_started(job, 1, 1, granted)
        assert started is not None
        tx.save(started, EVENT)
        end = granted + timedelta(hours=1)
        ended = worker_gone(started, Trigger.WORKER_EXITED, Outcome.EXITED, None, Exit(0), end)
        assert ended is not None
        tx.save(ended, EVENT)
    return ended


def test_pages_follow_each_other_without_gaps(store: SqlStore) -> None:
    jobs = [ran(store, NOON, timedelta(0)).id for _ in range(5)]

    latest = store.jobs(None, State.ENDED, 2)
    earlier = store.jobs(None, State.ENDED, 9, before=latest[0].id)

    assert [job.id for job in (*earlier, *latest)] == jobs
    assert [job.id for job in store.jobs(None, None, 2, after=jobs[1])] == jobs[2:4]
    assert store.count_jobs(None, State.ENDED) == 5
    assert store.count_jobs("nobody", None) == 0


def test_only_jobs_that_ended_since_then_are_returned(store: SqlStore) -> None:
    ran(store, NOON - timedelta(days=2), timedelta(0))
    late = ran(store, NOON, timedelta(0))

    found = store.jobs(None, State.ENDED, 9, since=NOON - timedelta(days=1))

    assert [job.id for job in found] == [late.id]


def named(store: SqlStore, name: str, user: str = "alice") -> int:
    job = order(owner=replace(ALICE, user=user))
    with store.write() as tx:
        return tx.add(replace(job, name=name), NOON).id


def listed(store: SqlStore, **query: Any) -> list[int]:
    return [job.id for job in JobQuery(**query).page(store).jobs]


@pytest.mark.parametrize("ended", [True, False])
def test_a_listing_by_name_has_the_same_jobs_from_memory_and_from_the_file(
    store: SqlStore, ended: bool
) -> None:
    first, second = named(store, "sweep-1"), named(store, "sweep-12")
    named(store, "train")

    assert listed(store, ended=ended, name="sweep*") == [first, second]
    assert listed(store, ended=ended, name="sweep-?") == [first]
    assert listed(store, ended=ended, name="*[!2]", limit=1) == [first]
    assert listed(store, ended=ended, name="SWEEP*") == []
    assert JobQuery(ended=ended, name="sweep*", limit=1).page(store)[1:] == (2, first)


@pytest.mark.parametrize("ended", [True, False])
def test_a_pattern_finds_out_no_name_that_is_hidden(store: SqlStore, ended: bool) -> None:
    named(store, "secret")
    own = named(store, "secret", user="bob")

    assert listed(store, ended=ended, name="s*", name_of="bob") == [own]
    assert listed(store, ended=ended, name="s*", name_of="bob", user="alice") == []


def test_a_listing_since_a_time_has_the_live_jobs_and_those_that_ended_since(
    store: SqlStore,
) -> None:
    ran(store, NOON - timedelta(days=2), timedelta(0))
    late, waiting = ran(store, NOON, timedelta(0)).id, named(store, "waits")

    since = NOON - timedelta(days=1)
    assert listed(store, ended=True, since=since) == [late, waiting]
    assert listed(store, ended=True, since=since, newest=True, limit=1) == [waiting]
    assert JobQuery(ended=True, since=since).page(store).total == 2


def test_waits_are_those_of_jobs_that_started_since_then(store: SqlStore) -> None:
    ran(store, NOON - timedelta(days=2), timedelta(hours=9))
    ran(store, NOON, timedelta(hours=1))
    ran(store, NOON, timedelta(hours=2))
    # The clock was set back between submission and grant.
    ran(store, NOON, timedelta(minutes=-5))

    (waits,) = UsageTotals(store).waits(NOON - timedelta(days=1)).values()

    assert (waits.started, waits.mean_s, waits.longest_s) == (3, 3600, 7200)
