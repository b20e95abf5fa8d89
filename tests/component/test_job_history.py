"""Ended jobs in pages: which ones the filters leave, and what is read for a page."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from daemon_stand_in import views
from fakes import NOON, order, reading
from gpulease.cli.list_page import _matches as list_matches
from gpulease.domain.job import Exit, Job, JobUsage, Outcome, grant, worker_gone, worker_started
from gpulease.domain.lease import Trigger
from gpulease.domain.placement import Placement
from gpulease.server.history import history_view, past_job_view
from gpulease.service.job_history import FAILED, EndedJobsQuery
from gpulease.service.ports import Event
from gpulease.store.job_history import JobHistory
from gpulease.store.store import SqlStore
from gpulease.units import GIB
from gpulease.wire.text import ending

EVENT = Event(NOON, "test")
DAY = timedelta(days=1)
SUCCESS = Exit(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus([reading()], NOON)
    yield opened
    opened.close()


def ended(
    store: SqlStore,
    outcome: Outcome = Outcome.EXITED,
    known: Exit | None = SUCCESS,
    at: datetime = NOON,
    **changes: Any,
) -> Job:
    with store.write() as tx:
        job = tx.add(replace(order(), **changes), at - DAY)
        job = grant(job, Placement(((reading().uuid, GIB),)), at - DAY)
        running = worker_started(job, 1, 1, at - DAY)
        assert running is not None
        tx.save(running, EVENT)
        done = worker_gone(running, Trigger.WORKER_EXITED, outcome, None, known, at)
        assert done is not None
        tx.save(done, EVENT)
    return done


def ids(store: SqlStore, **filters: Any) -> list[int]:
    return [job.id for job in JobHistory(store).page(EndedJobsQuery(**filters))]


def test_pages_follow_each_other_without_gaps(store: SqlStore) -> None:
    jobs = [ended(store).id for _ in range(5)][::-1]

    first = ids(store, limit=2)
    assert (first, ids(store, before=first[-1])) == (jobs[:2], jobs[2:])
    assert ids(store, before=1) == []


def test_jobs_that_have_not_ended_are_no_history(store: SqlStore) -> None:
    with store.write() as tx:
        tx.add(order(), NOON)

    assert ids(store) == []


def test_since_is_about_the_end_also_of_a_job_that_ran_for_long(store: SqlStore) -> None:
    long, early, late = (ended(store, at=at) for at in (NOON, NOON - 2 * DAY, NOON))

    assert ids(store, since=NOON - DAY) == [late.id, long.id]
    assert ids(store, since=NOON - DAY, before=late.id, limit=1) == [long.id]
    assert ids(store, since=NOON - 3 * DAY) == [late.id, early.id, long.id]
    assert ids(store, since=NOON + DAY) == []


@pytest.mark.parametrize("pattern", ["sweep*", "sweep-?", "*[!0-9]", "*[ab]", "Sweep*", "*", "*é"])
def test_a_name_matches_as_it_does_for_cancel(store: SqlStore, pattern: str) -> None:
    names = ("sweep-a", "sweep-1", "sweep-10", "b", "été", "Sweep")
    jobs = {ended(store, name=name).id: name for name in names}

    found = ids(store, name=pattern)

    assert {jobs[each] for each in found} == {name for name in names if fnmatchcase(name, pattern)}


def test_a_name_that_is_hidden_cannot_be_found_by_a_pattern(store: SqlStore) -> None:
    job = ended(store, name="secret")

    assert ids(store, name="secret", name_of="bob") == []
    assert ids(store, name="secret", name_of=job.owner.user) == [job.id]


def test_a_state_means_what_it_means_to_list(store: SqlStore) -> None:
    exits = (SUCCESS, Exit(1), Exit(None, 9), None)
    jobs = [ended(store, outcome, known) for outcome in Outcome for known in exits]
    page = history_view(JobHistory(store).page(EndedJobsQuery()), 1000, None).jobs
    listed = {
        job.id: views.over(job.id, job.exit_status, outcome=job.outcome or "lost") for job in page
    }
    assert len(listed) == len(jobs)

    for state in (FAILED, *Outcome):
        expected = {
            each for each, job in listed.items() if list_matches(job, state.replace("_", "-"))
        }
        assert set(ids(store, outcome=state)) == expected, state


def test_what_is_shown_is_what_the_job_was(store: SqlStore) -> None:
    job = ended(store, Outcome.TIME_LIMIT, None, name="train")

    (found,) = JobHistory(store).page(EndedJobsQuery(user=job.owner.user))

    assert (found.name, found.user, found.outcome) == ("train", job.owner.user, "time_limit")
    assert (found.submitted_at, found.granted_at, found.ended_at) == (NOON - DAY, NOON - DAY, NOON)
    assert (found.leased, found.is_hold, found.gpus) == (GIB, False, 1)


def test_a_job_that_ran_out_of_memory_says_so(store: SqlStore) -> None:
    ended(store, Outcome.EXITED, Exit(1), usage=JobUsage(out_of_memory=True))
    (found,) = JobHistory(store).page(EndedJobsQuery())
    view = past_job_view(found)
    assert (view.out_of_memory, ending(view)) == (True, "out of GPU memory")
