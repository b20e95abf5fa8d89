"""More time for a job, or less."""

from datetime import timedelta
from typing import Any

import pytest

from fakes import NOON, FakeClock, FakeFinder, FakeGpus, G, MemoryStore, order
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.errors import BadValue, WrongState
from gpulease.service import jobs
from gpulease.service.jobs import extend
from gpulease.service.observation import observe
from gpulease.service.ports import Policy, WorkerStarted
from gpulease.service.scheduler import reconcile

HOUR = timedelta(hours=1)


class Desk:
    """A store with one GPU, and a clock."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.gpus = FakeGpus({"GPU-a": 8 * G})

    def queued(self, **fields: Any) -> Job:
        with self.store.write() as tx:
            return tx.add(order(**fields), self.clock.now())

    def running(self, **fields: Any) -> Job:
        job = self.queued(**fields)
        seen = observe(self.store, self.gpus, FakeFinder(), self.clock)
        reconcile(self.store, seen, Policy(), self.clock)
        return jobs.note_started(self.store, job.id, WorkerStarted(10, 9, self.clock.now()))

    def extend(self, job: Job, by: timedelta) -> Job:
        return extend(self.store, job.id, by, "alice", self.clock)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_running_job_ends_so_much_later(desk: Desk) -> None:
    job = desk.running(time_limit=HOUR)
    desk.clock.forward(minutes=30)
    extended = desk.extend(job, 2 * HOUR)
    assert extended.expires_at == NOON + 3 * HOUR
    assert desk.store.job(job.id) == extended
    assert desk.store.events(job.id)[-1].kind == "extend"
    assert desk.store.events(job.id)[-1].detail == "by +2h to 3h, by alice"


def test_a_waiting_job_asks_for_so_much_more(desk: Desk) -> None:
    job = desk.queued(time_limit=HOUR)
    extended = desk.extend(job, HOUR)
    assert (extended.state, extended.claim.time_limit) == (State.QUEUED, 2 * HOUR)


def test_a_limit_may_be_shortened_as_long_as_it_lies_ahead(desk: Desk) -> None:
    job = desk.running(time_limit=3 * HOUR)
    desk.clock.forward(hours=1, minutes=30)
    assert desk.extend(job, -HOUR).expires_at == NOON + 2 * HOUR
    with pytest.raises(BadValue, match=r"-1h.*1h 30m"):
        desk.extend(job, -HOUR)
    with pytest.raises(BadValue, match="-9h"):
        desk.extend(job, -9 * HOUR)
    kept = desk.store.job(job.id)
    assert kept is not None
    assert kept.expires_at == NOON + 2 * HOUR, "a refusal changes nothing"


def test_a_waiting_job_cannot_be_left_without_time(desk: Desk) -> None:
    job = desk.queued(time_limit=HOUR)
    with pytest.raises(BadValue):
        desk.extend(job, -HOUR)


def test_no_limit_grows_past_all_bounds(desk: Desk) -> None:
    job = desk.running(time_limit=timedelta(days=3000))
    with pytest.raises(BadValue, match="3650 days"):
        desk.extend(job, timedelta(days=1000))


def test_a_job_without_a_limit_needs_no_more_time(desk: Desk) -> None:
    job = desk.running()
    with pytest.raises(WrongState) as refused:
        desk.extend(job, HOUR)
    assert refused.value.hint


def test_who_was_asked_to_go_or_has_gone_gets_no_more_time(desk: Desk) -> None:
    running, queued = desk.running(time_limit=HOUR), desk.queued(time_limit=HOUR)
    jobs.cancel(desk.store, running.id, "alice", desk.clock)
    with pytest.raises(WrongState):
        desk.extend(running, HOUR)
    jobs.cancel(desk.store, queued.id, "alice", desk.clock)
    with pytest.raises(WrongState) as refused:
        desk.extend(queued, HOUR)
    assert f"gpulease show {queued.id}" in (refused.value.hint or "")
