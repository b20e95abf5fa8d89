"""What is counted of jobs: each committed change once, and nothing that was rolled back."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest

from daemon_stand_in import views
from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    G,
    ended_job,
    order,
    reading,
)
from gpulease.domain.job import NOT_FAILED, Exit, Job, Outcome, Owner
from gpulease.domain.lease import Claim, State
from gpulease.domain.notifications import NotifyEvent, message_on
from gpulease.domain.queue_options import Indices
from gpulease.errors import RecordUnwritable
from gpulease.server.reasons import exit_status
from gpulease.service import jobs, scheduler, submission
from gpulease.service.job_list import JobQuery
from gpulease.service.metrics import MOST_USERS, OTHER, Held, Histogram, UserMetrics
from gpulease.service.observation import Observation
from gpulease.service.ports import Event, Policy, WorkerExited, WorkerStarted
from gpulease.service.queue_state import QueueState
from gpulease.store.store import SqlStore
from gpulease.units import Share
from gpulease.wire.text import has_failed

EVENT = Event(NOON, "test")


@dataclass
class World:
    """A queue for one GPU, on a clock that the test moves."""

    path: Path
    clock: FakeClock
    store: SqlStore

    def submit(self, owner: Owner = ALICE, memory: int = G) -> Job:
        wanted = order(memory, owner=owner)
        state = QueueState(self.store)
        seen = Observation((reading(),), {}, self.clock.now())
        return submission.submit(self.store, wanted, seen, Policy(), self.clock, state)

    def grant(self) -> None:
        seen = Observation((reading(),), {}, self.clock.now())
        scheduler.reconcile(self.store, seen, Policy(), self.clock)

    def start(self, job: Job) -> None:
        jobs.note_started(self.store, job.id, WorkerStarted(10, 9, self.clock.now()))

    def end(self, job: Job, outcome: Outcome = Outcome.EXITED, code: int = 0) -> None:
        news = WorkerExited(outcome, Exit(code), self.clock.now())
        jobs.note_exited(self.store, job.id, news)

    def of(self, user: str = ALICE.user) -> UserMetrics:
        return dict(self.store.metrics.users())[user]

    def restart(self) -> None:
        """Open the database again, as a daemon does after a kill."""
        self.store = SqlStore(self.path, self.now_s)

    def now_s(self) -> float:
        return self.clock.steady().total_seconds()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock, path = FakeClock(), tmp_path / "gpulease.db"
    store = SqlStore(path, lambda: clock.steady().total_seconds())
    made = World(path, clock, store)
    yield made
    made.store.close()
    store.close()


def live(counted: UserMetrics) -> dict[State, int]:
    return {state: number for state, number in counted.states.items() if number}


def test_the_life_of_a_job_is_counted_at_each_step(world: World) -> None:
    job = world.submit(memory=2 * G)
    assert (world.of().submitted, live(world.of())) == (1, {State.QUEUED: 1})
    world.clock.forward(seconds=90)
    world.grant()
    assert live(world.of()) == {State.GRANTED: 1}
    world.start(job)
    world.clock.forward(seconds=10)
    assert (world.of().started, live(world.of())) == (1, {State.ACTIVE: 1})
    held = world.of().held.at(world.now_s())
    assert (held.leases, held.gpu_seconds, held.byte_seconds) == (1, 10.0, 20.0 * G)
    world.end(job, code=3)
    world.clock.forward(seconds=100)
    assert (dict(world.of().ended), world.of().failed) == ({Outcome.EXITED: 1}, 1)
    assert live(world.of()) == {}
    assert world.of().held.at(world.now_s())[:4] == (0, 0, 10.0, 20.0 * G)
    waits = world.store.metrics.waits
    assert (sum(waits.counts), waits.sum) == (1, 90.0)
    assert waits.counts[waits.bounds.index(300.0)] == 1


def test_what_is_rolled_back_is_not_counted(world: World) -> None:
    class Fault(Exception):
        pass

    with suppress(Fault), world.store.write() as tx:
        tx.add(order(), NOON)
        raise Fault
    assert world.store.metrics.users() == []
    with suppress(Fault), world.store.batch():
        world.submit()
        raise Fault
    assert world.store.metrics.users() == []


def test_a_job_that_is_queued_again_is_no_new_submission_and_waits_again(world: World) -> None:
    job = world.submit()
    world.grant()
    world.start(job)
    jobs.requeue(world.store, job.id, "alice", world.clock)
    world.end(job, Outcome.REQUEUED)
    counted = world.of()
    assert (counted.submitted, counted.requeued) == (1, 1)
    assert (dict(counted.ended), live(counted)) == ({Outcome.REQUEUED: 1}, {State.QUEUED: 1})
    world.grant()
    assert sum(world.store.metrics.waits.counts) == 2


def test_all_that_happens_within_one_commit_is_counted(world: World) -> None:
    with world.store.batch():
        job = world.submit()
        world.grant()
        world.start(job)
        world.end(job)
    counted = world.of()
    assert (counted.submitted, counted.started, dict(counted.ended)) == (
        1, 1, {Outcome.EXITED: 1},
    )  # fmt: skip
    assert (live(counted), sum(world.store.metrics.waits.counts)) == ({}, 1)


def test_counters_begin_at_zero_with_a_daemon_and_what_lives_then_ends_in_them(
    world: World,
) -> None:
    ended, running, waiting = world.submit(), world.submit(), world.submit(BOB, memory=8 * G)
    world.grant()
    world.start(ended), world.start(running)
    world.end(ended)
    world.store.close()
    world.restart()
    assert live(world.of()) == {State.ACTIVE: 1}
    assert live(world.of(BOB.user)) == {State.QUEUED: 1}
    assert (world.of().submitted, world.of().started, dict(world.of().ended)) == (0, 0, {})
    world.clock.forward(seconds=7)
    assert world.of().held.at(world.now_s()).gpu_seconds == 7.0
    # A shim reports again what the former daemon has stored.
    world.end(ended)
    world.end(running)
    jobs.cancel(world.store, waiting.id, "bob", world.clock)
    assert dict(world.of().ended) == {Outcome.EXITED: 1}
    assert dict(world.of(BOB.user).ended) == {Outcome.CANCELLED: 1}
    assert world.submit().id > waiting.id
    assert world.of().submitted == 1


def test_an_ended_job_that_is_stored_again_does_not_end_again(world: World) -> None:
    job = world.submit()
    jobs.cancel(world.store, job.id, "alice", world.clock)
    ended = world.store.job(job.id)
    assert ended is not None
    for _ in range(2):
        with world.store.write() as tx:
            tx.save(replace(ended, detail="known better"), Event(NOON, "notice"))
    assert dict(world.of().ended) == {Outcome.CANCELLED: 1}
    assert live(world.of()) == {}


def test_each_element_of_an_array_counts(world: World) -> None:
    indices = Indices((0, 1, 2))
    with world.store.write() as tx:
        first, *_ = tx.add_array(replace(order(), indices=indices), indices, NOON)
    assert (world.of().submitted, live(world.of())) == (3, {State.QUEUED: 3})
    jobs.cancel_all(world.store, lambda _: True, lambda _: "alice", world.clock)
    assert dict(world.of().ended) == {Outcome.CANCELLED: 3}
    assert first.id == 1


def test_users_after_the_first_ones_are_counted_together(world: World) -> None:
    for number in range(MOST_USERS + 5):
        world.submit(Owner(1000 + number, 1000, f"user{number}"))
    names = [user for user, _ in world.store.metrics.users()]
    assert names == [*(f"user{number}" for number in range(MOST_USERS)), OTHER]
    assert (world.of(OTHER).submitted, live(world.of(OTHER))) == (5, {State.QUEUED: 5})
    jobs.cancel_all(world.store, lambda _: True, lambda _: "root", world.clock)
    assert live(world.of(OTHER)) == live(world.of("user0")) == {}


def test_commits_are_timed_and_failed_writes_counted(world: World) -> None:
    before = sum(world.store.commits.durations.counts)
    world.submit()
    assert sum(world.store.commits.durations.counts) == before + 1
    assert world.store.commits.failed == 0
    world.path.rename(world.path.with_name("away"))
    world.path.mkdir()
    with pytest.raises(RecordUnwritable):
        world.submit()
    assert world.store.commits.failed == 1
    world.path.rmdir()
    world.path.with_name("away").rename(world.path)


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (1.0, 0), (1.01, 1), (5.0, 1), (1e9, 2)])
def test_a_duration_is_counted_in_the_first_bucket_that_includes_it(
    seconds: float, bucket: int
) -> None:
    histogram = Histogram((1.0, 5.0))
    histogram.observe(seconds)
    assert [place for place, count in enumerate(histogram.counts) if count] == [bucket]


def test_a_clock_that_was_set_back_gives_no_negative_wait(world: World) -> None:
    job = world.submit()
    with world.store.write() as tx:
        tx.save(replace(job, submitted_at=NOON + timedelta(days=1)), None)
    world.grant()
    assert world.store.metrics.waits.sum == 0.0


def test_what_was_held_never_decreases() -> None:
    held = Held(2, 8, 5.0, 9.0, 100.0)
    assert held.at(99.0).gpu_seconds == 5.0
    assert held.at(101.0)[2:4] == (7.0, 17.0)


EXITS = {
    Outcome.EXITED: (Exit(0), Exit(3)),
    Outcome.SIGNALED: (Exit(None, 9),),
    **dict.fromkeys((Outcome.TIME_LIMIT, Outcome.OVER_LEASE, Outcome.IDLE), (Exit(0), Exit(3))),
    **dict.fromkeys(NOT_FAILED, (Exit(0), Exit(None, 15))),
}
"""What the main process may have ended with; None for all other outcomes."""


@pytest.mark.parametrize(
    ("outcome", "exit_"),
    [(outcome, each) for outcome in Outcome for each in EXITS.get(outcome, (None,))],
)
def test_a_failed_job_is_the_same_to_counters_filters_and_notifications(
    world: World, outcome: Outcome, exit_: Exit | None
) -> None:
    job = world.submit()
    world.grant()
    world.start(job)
    with world.store.write() as tx:
        running = tx.job(job.id)
        assert running is not None
        running = replace(running, notify=(NotifyEvent.FAIL,))
        ended = replace(ended_job(running, outcome, at=world.clock.now()), exit=exit_)
        tx.save(ended, EVENT)

    counted = world.of().failed
    listed = world.store.jobs(JobQuery(state="failed")).jobs
    view = views.over(1, exit_status(ended), outcome=outcome.value)
    assert len(listed) == counted
    assert (message_on(running, ended) is not None) == bool(counted)
    assert has_failed(view) == bool(counted)
    expected = outcome not in NOT_FAILED and (outcome is not Outcome.EXITED or exit_ != Exit(0))
    assert bool(counted) == expected


def test_users_on_record_leave_names_for_new_ones(world: World) -> None:
    with world.store.write() as tx:
        for number in range(MOST_USERS + 20):
            tx.add(order(owner=replace(ALICE, user=f"user{number}")), NOON)
    jobs.cancel_all(world.store, lambda _: True, lambda _: "root", world.clock)
    world.restart()
    names = [user for user, _ in world.store.metrics.users()]
    assert names == [f"user{number}" for number in range(MOST_USERS + 19, MOST_USERS // 2 + 19, -1)]
    world.submit(BOB)
    assert world.of(BOB.user).submitted == 1


def test_the_demand_is_that_of_queued_jobs_that_may_start(world: World) -> None:
    first, second = world.submit(memory=2 * G), world.submit(BOB, memory=G)
    world.clock.forward(seconds=5)
    share = replace(order(owner=BOB), claim=Claim(Share(Fraction(50)), gpus=2))
    with world.store.write() as tx:
        third = tx.add(share, world.clock.now())
    metrics = world.store.metrics
    jobs_ = [first, second, third]
    found = metrics.demand(jobs_, {first.id}, 8 * G)
    assert {user: (each.gpus, each.memory) for user, each in found.items()} == {
        BOB.user: (3, 9 * G)
    }
    assert found[BOB.user].oldest_at == second.submitted_at
    world.grant()
    assert metrics.demand(world.store.live(), (), 8 * G).keys() == {BOB.user}
