"""Arrays in the database: one invocation, quotas, the end of the last element, many elements."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import event, select

from fakes import (
    ALICE,
    NOON,
    FakeClock,
    ended_job,
    granted_job,
    kept,
    order,
    reading,
)
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome
from gpulease.domain.limits import UserLimits
from gpulease.domain.queue_options import (
    Condition,
    Dependency,
    Indices,
    QueueOptions,
    WantedDependency,
)
from gpulease.errors import NoSuchJob, TooMany
from gpulease.service.editing import Edit, Move, edit, move
from gpulease.service.job_list import JobQuery
from gpulease.service.jobs import cancel, note_exited
from gpulease.service.observation import Observation
from gpulease.service.ports import Event, Policy, Submission, WorkerExited
from gpulease.service.submission import submit
from gpulease.service.transactions import change_jobs
from gpulease.store.retention import Retention
from gpulease.store.rows import PAST
from gpulease.store.store import SqlStore
from gpulease.store.tables import InvocationRow

EVENT = Event(NOON, "test")
SEEN = Observation((reading(),), {}, {}, frozenset(), NOON)
CLOCK = FakeClock()


def elements(store: SqlStore, array: Job, index: int | None = None) -> Sequence[Job]:
    return store.jobs(JobQuery(array=array.id, index=index, ended=True)).jobs


def _array(*indices: int, most: int | None = None) -> Submission:
    return replace(order(), indices=Indices(indices, most))


def _submit(store: SqlStore, submission: Submission, most: int | None = None) -> Job:
    policy = Policy(limits_of=lambda _: UserLimits(most_waiting=most))
    return submit(store, submission, SEEN, policy, CLOCK)


def _run(store: SqlStore, job: JobId, code: int = 0) -> None:
    held = granted_job(kept(store, job))
    for step in (held, ended_job(held, code=code)):
        with change_jobs(store) as tx:
            tx.save(step, EVENT)


def _invocations(store: SqlStore) -> int:
    """Return how many invocations can start a job: those of ended ones have no environment."""
    with store.reading() as connection:
        contents = connection.scalars(select(InvocationRow.content)).all()
    return sum(not each.startswith(PAST) for each in contents)


def test_elements_share_one_invocation_until_the_last_has_ended(store: SqlStore) -> None:
    secret = replace(order().invocation, environment={"TOKEN": "secret"})
    first = _submit(store, replace(_array(0, 5, 9), invocation=secret))
    assert [job.label for job in store.live()] == ["1_0", "1_5", "1_9"]
    assert [job.id for job in store.live()] == [1, 2, 3]
    assert _invocations(store) == 1

    _run(store, first.id)
    assert _invocations(store) == 1
    assert store.invocation(JobId(3)) == secret
    _run(store, JobId(3))
    _run(store, JobId(2))
    assert _invocations(store) == 0
    with pytest.raises(NoSuchJob):
        store.invocation(first.id)
    for number in (1, 3):
        ended = store.job(JobId(number))
        assert ended is not None
        past = store.past_invocation(ended)
        assert (past.argv, past.environment) == (order().invocation.argv, {})


def test_a_reopened_database_has_the_same_array_and_the_same_counts(
    store: SqlStore, tmp_path: Path
) -> None:
    _submit(store, _array(0, 1, 2, most=2))
    with change_jobs(store) as tx:
        counts = tx.user_count(ALICE.uid)
    live = store.live()
    store.close()
    again = SqlStore(tmp_path / "gpulease.db")
    assert again.live() == live
    with again.write() as tx:
        assert tx.user_count(ALICE.uid) == counts
        assert counts.waiting == 3
    again.close()


def test_the_bytes_of_an_array_count_once_and_while_an_element_waits(store: SqlStore) -> None:
    with change_jobs(store) as tx:
        tx.add(order(), NOON)
        alone = tx.user_count(ALICE.uid).waiting_bytes
    _submit(store, _array(0, 1))
    for job, expected in ((2, 2 * alone), (3, alone)):
        _run(store, JobId(job))
        with change_jobs(store) as tx:
            assert tx.user_count(ALICE.uid).waiting_bytes == expected


def test_every_element_counts_for_the_limit_of_waiting_jobs(store: SqlStore) -> None:
    _submit(store, order(), most=3)
    with pytest.raises(TooMany):
        _submit(store, _array(0, 1, 2), most=3)
    _submit(store, _array(0, 1), most=3)
    assert len(store.live()) == 3


def test_the_same_key_submits_an_array_once(store: SqlStore) -> None:
    submission = replace(_array(0, 1), key="k")
    assert _submit(store, submission).id == _submit(store, submission).id
    assert len(store.live()) == 2


def test_retention_keeps_the_first_element_while_others_need_its_invocation(
    store: SqlStore,
) -> None:
    first = _submit(store, _array(0, 1))
    _run(store, first.id)
    retention = Retention(store)
    later = NOON + timedelta(days=1)
    assert retention.expired(later, 10) == []
    _run(store, JobId(2))
    assert retention.expired(later, 10) == [1, 2]


def test_an_element_and_the_whole_array_can_be_waited_for(store: SqlStore) -> None:
    array = _submit(store, _array(3, 4))
    one = _submit(store, replace(order(), after=(WantedDependency(array.id, 4),)))
    all_ = _submit(store, replace(order(), after=(WantedDependency(array.id),)))
    assert one.queue.after == (Dependency(JobId(2)),)
    assert all_.queue.after == (Dependency(array.id, Condition.OK, whole_array=True),)
    _run(store, JobId(2))
    live = {job.id: job for job in store.live()}
    assert live[one.id].queue.after == ()
    assert live[all_.id].queue.after
    _run(store, JobId(1))
    assert {job.id: job.queue.after for job in store.live()} == {one.id: (), all_.id: ()}


def test_a_dependency_that_failed_before_the_submission_ends_the_job_at_once(
    store: SqlStore,
) -> None:
    first = _submit(store, order())
    _run(store, first.id, 3)
    job = _submit(store, replace(_array(0, 1), after=(WantedDependency(first.id),)))
    assert job.outcome is Outcome.DEPENDENCY_FAILED
    assert store.live() == ()
    assert [each.kind for each in store.events(job.id)] == ["submitted", "cancel"]
    assert _invocations(store) == 0


@contextmanager
def _statements(store: SqlStore) -> Iterator[list[str]]:
    """Collect the statements that the database gets."""
    sent: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        sent.append(statement)

    event.listen(store.engine, "before_cursor_execute", note)
    yield sent
    event.remove(store.engine, "before_cursor_execute", note)


@pytest.mark.parametrize("condition", list(Condition))
def test_the_end_of_an_element_costs_the_same_whatever_waits_for_its_array(
    store: SqlStore, condition: Condition
) -> None:
    array = _submit(store, _array(0, 1, 2))
    with _statements(store) as alone:
        _run(store, array.id)
    after = (WantedDependency(array.id, None, condition),)
    waiting = _submit(store, replace(_array(*range(500)), after=after))

    with _statements(store) as with_dependents:
        _run(store, JobId(array.id + 1))
    assert with_dependents == alone
    with _statements(store) as last:
        _run(store, JobId(array.id + 2))

    assert len(last) < len(alone) + 8
    outcomes = {job.outcome for job in elements(store, waiting)}
    assert outcomes == {Outcome.DEPENDENCY_FAILED if condition is Condition.FAIL else None}
    assert not any(job.queue.after for job in store.live())


def test_a_failure_ends_a_long_chain_in_a_few_statements(store: SqlStore) -> None:
    """Single jobs and arrays take turns; each link has its own reason."""
    links = [_submit(store, order())]
    for place in range(200):
        after = (WantedDependency(links[-1].id),)
        submission = _array(0, 1) if place % 2 else order()
        links.append(_submit(store, replace(submission, after=after)))

    with _statements(store) as sent:
        cancel(store, links[0].id, "alice", CLOCK)

    assert len(sent) < 20
    assert store.live() == ()
    for before, link in pairwise(links):
        (_, ended) = store.events(link.id)
        assert f"job {before.id}" in (ended.detail or "")
        job = kept(store, link.id)
        assert (job.outcome, job.detail) == (Outcome.DEPENDENCY_FAILED, ended.detail)


def test_an_array_is_edited_and_moved_in_a_few_statements(store: SqlStore) -> None:
    array = _submit(store, _array(*range(300)))
    jobs = [job.id for job in store.live()]
    wanted = Edit(claim={"time_limit": timedelta(hours=3)}, options={"nice": 5}, name="other")
    with _statements(store) as sent:
        edit(store, jobs, wanted, "alice", SEEN, Policy(), CLOCK)
        move(store, jobs, Move(None, ALICE.uid, "alice", is_admin=False), CLOCK)
    assert len(sent) < 20
    assert {job.name for job in store.live()} == {"other"}
    for job in elements(store, array)[:2]:
        kinds = [(each.kind, each.detail or "") for each in store.events(job.id)]
        assert [kind for kind, _ in kinds] == ["submitted", "edit", "move"]
        assert "nice 0 to 5" in kinds[1][1]


def test_an_element_that_is_queued_again_keeps_the_command_of_its_array(store: SqlStore) -> None:
    """All other elements have ended, and so has the one that it continues."""
    again = QueueOptions(requeue=True)
    array = _submit(store, replace(_array(0, 3), queue=again))
    _run(store, array.id)
    element = store.job(JobId(array.id + 1))
    assert element is not None
    with change_jobs(store) as tx:
        tx.save(granted_job(element), EVENT)

    note_exited(store, element.id, WorkerExited(Outcome.LOST, None, NOON, "it was lost"))

    (new,) = store.live()
    assert (new.label, new.usage.retry_of) == (f"{array.id}_3", element.id)
    assert store.invocation(new.id).argv == ("true",)
    with change_jobs(store) as tx:
        assert tx.element(array.id, 3) == new
        assert tx.failed_element(array.id) is None
    _run(store, new.id)
    assert _invocations(store) == 0
