"""Edits and moves of waiting jobs: what is checked again, what is recorded, and what stays."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    G,
    MemoryStore,
    granted_job,
    hold_order,
    kept,
    order,
    reading,
)
from goldens import mentions
from gpulease.domain.gpu import JobId
from gpulease.domain.job import EarlySignal, Job, Outcome, asked_to_end
from gpulease.domain.lease import State, Trigger
from gpulease.domain.limits import Beyond, UserLimits
from gpulease.domain.queue_options import Condition, Dependency, Priority, WantedDependency
from gpulease.errors import (
    BadValue,
    CannotLease,
    GpuleaseError,
    NotAllowed,
    TooMany,
    WrongState,
)
from gpulease.server.job_requests import edit_of
from gpulease.service.editing import Edit, Move, edit, move
from gpulease.service.observation import Observation
from gpulease.service.ports import Event, Policy, Submission
from gpulease.units import GIB
from gpulease.wire.requests import EditRequest

CLOCK = FakeClock()
SEEN = Observation((reading(),), NOON, {})


def waiting(store: MemoryStore, submission: Submission | None = None, **options: Any) -> Job:
    """Return a new job that waits."""
    submission = submission or order()
    submission = replace(submission, queue=replace(submission.queue, **options))
    with store.write() as tx:
        return tx.add(submission, NOON)


def edited(store: MemoryStore, wanted: Edit, *jobs: Job) -> Sequence[tuple[str, ...]]:
    numbers = [job.id for job in jobs]
    done = edit(store, numbers, wanted, "alice", SEEN, Policy(), CLOCK)
    return [each.changes for each in done]


def test_an_edit_changes_what_it_names_and_records_it() -> None:
    store = MemoryStore()
    aging_since = NOON - timedelta(hours=3)
    job = waiting(store, aging_since_at=aging_since, nice=3)
    wanted = Edit(
        claim={"memory": 2 * G, "time_limit": timedelta(hours=2)},
        options={"priority": Priority.LOW, "held": True},
        name="second",
    )
    (changes,) = edited(store, wanted, job)
    after = kept(store, job.id)
    assert (after.claim.memory, after.claim.gpus) == (2 * G, 1)
    assert (after.name, after.queue.priority, after.queue.nice) == ("second", Priority.LOW, 3)
    assert after.queue.aging_since_at == aging_since, "its age stays"
    (event,) = store.events(job.id)
    assert mentions(event.detail, "memory 1G to 2G", "held no to yes", "alice", *changes)
    assert edited(store, wanted, job) == [()]
    assert len(store.events(job.id)) == 1, "an edit that changes nothing leaves no trace"


def test_a_claim_that_can_never_be_granted_changes_nothing() -> None:
    store = MemoryStore()
    first, second = waiting(store), waiting(store)
    for claim in ({"memory": 100 * G}, {"gpus": 2}):
        with pytest.raises(CannotLease):
            edited(store, Edit(claim=claim, name="x"), first, second)
    assert {kept(store, job.id) for job in (first, second)} == {first, second}


def test_many_jobs_are_edited_in_one_transaction_all_or_none() -> None:
    store = MemoryStore()
    jobs = [waiting(store) for _ in range(100)]
    before = store.writes
    assert len(edited(store, Edit(options={"nice": 5}), *jobs)) == 100
    assert store.writes == before + 1
    running = granted_job(jobs[-1])
    with store.write() as tx:
        tx.save(running, Event(NOON, "grant"))
    with pytest.raises(WrongState) as refused:
        edited(store, Edit(options={"nice": 7}), *jobs)
    assert mentions(refused.value.hint, "extend", "requeue")
    assert kept(store, jobs[0].id).queue.nice == 5


def test_holds_and_ended_jobs_are_not_edited() -> None:
    store = MemoryStore()
    hold = waiting(store, hold_order())
    ended = waiting(store)
    over = asked_to_end(ended, Trigger.CANCEL, Outcome.CANCELLED, "", NOON)
    assert over is not None
    with store.write() as tx:
        tx.save(over, Event(NOON, "cancel"))
    for job in (hold, ended):
        with pytest.raises(WrongState):
            edited(store, Edit(name="x"), job)


def test_a_job_cannot_wait_for_itself_through_others() -> None:
    store = MemoryStore()
    first = waiting(store)
    second = waiting(store, after=(Dependency(first.id),))
    for job, other in ((first, second), (first, first)):
        with pytest.raises(BadValue):
            edited(store, Edit(after=(WantedDependency(other.id),)), job)
    third = waiting(store)
    edited(store, Edit(after=(WantedDependency(third.id, condition=Condition.ANY),)), second)
    assert [str(each) for each in kept(store, second.id).queue.after] == [f"{third.id}:any"]
    assert edited(store, Edit(after=()), second) == [(f"after {third.id}:any to none",)]


def test_jobs_that_are_edited_together_may_not_wait_for_one_of_them() -> None:
    store = MemoryStore()
    first, second = waiting(store), waiting(store)
    after_second = waiting(store, after=(Dependency(second.id),))
    with pytest.raises(BadValue):
        edited(store, Edit(after=(WantedDependency(after_second.id),)), first, second)
    # The old dependency of a job that is edited does not count.
    edited(store, Edit(after=(WantedDependency(first.id),)), after_second, second)


def test_a_long_cycle_is_shortened() -> None:
    store = MemoryStore()
    chain = [waiting(store)]
    for _ in range(100):
        chain.append(waiting(store, after=(Dependency(chain[-1].id),)))
    with pytest.raises(BadValue) as refused:
        edited(store, Edit(after=(WantedDependency(chain[-1].id),)), chain[0])
    assert mentions(refused.value.message, "1 after 101 after 100", "97 more")
    assert len(refused.value.message) < 120


def test_the_signal_ahead_of_the_time_limit_stays_within_it() -> None:
    store = MemoryStore()
    submission = order(time_limit=timedelta(hours=1))
    early = EarlySignal(10, timedelta(minutes=2))
    submission = replace(submission, invocation=replace(submission.invocation, early_signal=early))
    job = waiting(store, submission)
    for limit in (timedelta(minutes=2), None):
        with pytest.raises(BadValue):
            edited(store, Edit(claim={"time_limit": limit}), job)
    assert edited(store, Edit(claim={"time_limit": timedelta(minutes=3)}), job)


def test_a_request_is_checked_as_a_submission_is_and_names_the_field() -> None:
    admin_only = ({"priority": "high"}, {"nice": -1})
    for fields in admin_only:
        with pytest.raises(NotAllowed) as refused:
            edit_of(EditRequest([1], **fields), is_admin=False)
        assert refused.value.parts is not None
        edit_of(EditRequest([1], **fields), is_admin=True)
    wrong: tuple[dict[str, Any], ...] = (
        {}, {"memory": 0}, {"memory": 1, "share": 5.0}, {"share": 101.0}, {"gpus": 0},
        {"time_limit": -1.0}, {"time_limit": 1e12}, {"name": "a\nb"}, {"nice": 20},
        {"begin_at": "tomorrow"}, {"after": ["x"]}, {"after": ["17:sometimes"]},
        {"memory_bound": 1}, {"memory": 2, "memory_bound": 1}, {"ram": 1}, {"cpus": -1},
    )  # fmt: skip
    for fields in wrong:
        with pytest.raises(GpuleaseError) as refused:
            edit_of(EditRequest([1], **fields), is_admin=True)
        assert refused.value.http_status == 400
        assert "submit" not in refused.value.message
        assert (refused.value.parts is None) is (not fields)
    none = EditRequest([1], time_limit=0.0, begin_at="now", after=[], retries=0, nice=0, held=False)
    clears = Edit({"time_limit": None}, {"nice": 0, "held": False, "begin_at": None, "retries": 0})
    assert edit_of(none, is_admin=False) == replace(clears, after=())
    assert edit_of(EditRequest([1], memory=GIB), is_admin=False).claim == {
        "memory": GIB, "memory_bound": None,
    }  # fmt: skip
    assert edit_of(EditRequest([1], ram=0, cpus=0), is_admin=False).claim == {
        "ram": None, "cpus": None,
    }  # fmt: skip
    assert edit_of(EditRequest([1], ram=GIB), is_admin=False).claim == {"ram": GIB}


# Moves.


def moved(store: MemoryStore, job: Job, before: Job | None, **caller: Any) -> Job:
    wanted = Move(before and before.id, **{"uid": 1000, "who": "x", "is_admin": False, **caller})
    (after,) = move(store, [job.id], wanted, CLOCK)
    return after


def test_a_job_is_moved_before_another_one_of_its_user_or_before_all() -> None:
    store = MemoryStore()
    first, second, third = (waiting(store) for _ in range(3))
    assert moved(store, third, first).queue.moved_before == first.id
    assert moved(store, second, None).queue.moved_before == JobId(0)
    assert not kept(store, third.id).queue.moved_by_admin
    assert [event.kind for event in store.events(third.id)] == ["move"]


def test_a_later_move_wins_over_earlier_ones_that_contradict_it() -> None:
    store = MemoryStore()
    first, second, third = (waiting(store) for _ in range(3))
    moved(store, second, first)
    moved(store, third, second)
    moved(store, first, third)
    places = [kept(store, job.id).queue.moved_before for job in (first, second, third)]
    assert places == [third.id, None, second.id], "first before third before second"
    moved(store, second, None)
    moved(store, first, None)
    assert kept(store, second.id).queue.moved_before is None
    moved(store, third, first)
    assert kept(store, first.id).queue.moved_before is None


def test_users_move_before_their_own_jobs_and_admins_before_any() -> None:
    store = MemoryStore()
    mine, other = waiting(store), waiting(store, order(owner=BOB))
    with pytest.raises(NotAllowed):
        moved(store, mine, other)
    assert moved(store, mine, other, uid=0, is_admin=True).queue.moved_by_admin
    assert moved(store, other, None, uid=0, is_admin=True).queue.moved_by_admin
    assert not moved(store, mine, None, is_admin=True).queue.moved_by_admin, "of one's own"


def test_a_move_that_has_no_effect_is_refused() -> None:
    store = MemoryStore()
    job, high = waiting(store), waiting(store, priority=Priority.HIGH)
    running = granted_job(waiting(store))
    with store.write() as tx:
        tx.save(running, Event(NOON, "grant"))
    for before, why in ((job, BadValue), (high, BadValue), (running, WrongState)):
        with pytest.raises(why):
            moved(store, job, before)
    with pytest.raises(WrongState):
        moved(store, running, job)
    assert kept(store, job.id) == job
    with pytest.raises(BadValue) as refused:
        moved(store, job, high)
    assert mentions(refused.value.hint, f"edit {high.id} --priority normal")
    with pytest.raises(BadValue) as refused:
        moved(store, job, high, is_admin=True)
    assert mentions(refused.value.hint, f"edit {job.id} --priority high")
    low = waiting(store, priority=Priority.LOW)
    with pytest.raises(BadValue) as refused:
        moved(store, low, job)
    assert mentions(refused.value.hint, f"edit {low.id} --priority normal")
    assert ALICE.uid == 1000
    assert running.state is State.GRANTED


def test_the_limits_of_the_user_apply_and_not_those_of_an_admin() -> None:
    store = MemoryStore()
    limits = UserLimits(most_memory=2 * G, longest_time=timedelta(hours=1))
    policy = Policy(limits_of=lambda _: limits)
    job = waiting(store)
    too_much = Edit(claim={"memory": 3 * G}), Edit(claim={"time_limit": timedelta(hours=2)})
    for wanted in too_much:
        with pytest.raises((CannotLease, BadValue)):
            edit(store, [job.id], wanted, "alice", SEEN, policy, CLOCK)
        edit(store, [job.id], replace(wanted, by_admin=True), "root", SEEN, policy, CLOCK)
    assert kept(store, job.id).claim.time_limit == timedelta(hours=2)
    edit(store, [job.id], Edit(claim={"memory": G, "time_limit": None}), "a", SEEN, policy, CLOCK)
    assert kept(store, job.id).claim.time_limit == limits.longest_time
    wanted = Edit(claim={"time_limit": None})
    (done,) = edit(store, [job.id], wanted, "a", SEEN, policy, CLOCK)
    assert mentions("; ".join(done.changes), "longest_time", "1h")


def test_a_limit_that_refuses_more_counts_all_jobs_of_an_edit() -> None:
    store = MemoryStore()
    limits = UserLimits(most_memory=3 * G, over_limit=Beyond.REFUSE)
    policy = Policy(limits_of=lambda _: limits)
    jobs = [waiting(store), waiting(store)]
    numbers = [job.id for job in jobs]
    with pytest.raises(TooMany):
        edit(store, numbers, Edit(claim={"memory": 2 * G}), "alice", SEEN, policy, CLOCK)
    assert [kept(store, job.id) for job in jobs] == jobs
    edit(store, numbers[:1], Edit(claim={"memory": 2 * G}), "alice", SEEN, policy, CLOCK)
    edit(store, numbers, Edit(claim={"memory": G}), "alice", SEEN, policy, CLOCK)
