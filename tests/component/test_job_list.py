"""Listings: which jobs the filters leave, page by page."""

from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import pytest

from fakes import (
    ALICE,
    NOON,
    ended_job,
    order,
    running_job,
)
from gpulease.domain.eligibility import has_failed
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import State
from gpulease.service.job_list import FAILED, MOST_LISTED, JobQuery
from gpulease.service.ports import Event
from gpulease.store.store import SqlStore
from gpulease.units import GIB

EVENT = Event(NOON, "test")
DAY = timedelta(days=1)
SUCCESS = Exit(0)


def ended(
    store: SqlStore,
    outcome: Outcome = Outcome.EXITED,
    known: Exit | None = SUCCESS,
    at: datetime = NOON,
    **changes: Any,
) -> Job:
    with store.write() as tx:
        job = tx.add(replace(order(), **changes), at - DAY)
        running = running_job(job, at=at - DAY)
        done = replace(ended_job(running, outcome, at=at), exit=known)
        tx.save(running, EVENT)
        tx.save(done, EVENT)
    return done


def waiting(store: SqlStore, name: str = "train", user: str = ALICE.user) -> Job:
    with store.write() as tx:
        return tx.add(replace(order(owner=replace(ALICE, user=user)), name=name), NOON)


def ids(store: SqlStore, **filters: Any) -> list[int]:
    """Return the jobs of a listing; those of one in brief must be the same."""
    query = JobQuery(**filters)
    page = store.jobs(query)
    found = [job.id for job in page.jobs]
    if query.newest and query.state not in {None, *State} - {State.ENDED}:
        in_brief = store.ended_jobs(query)
        assert ([job.id for job in in_brief.jobs], in_brief.next) == (found, page.next)
    return found


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("filters", [{}, {"ended": True}, {"state": "ended"}, {"state": "queued"}])
@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_pages_follow_each_other_without_gaps(
    store: SqlStore, filters: dict[str, Any], limit: int, *, newest: bool
) -> None:
    for _ in range(3):
        ended(store)
        waiting(store)
    expected = ids(store, **filters)

    found, after = [], None
    while True:
        page = store.jobs(JobQuery(newest=newest, after=after, limit=limit, **filters))
        assert page.total == len(expected)
        assert len(page.jobs) <= limit
        found += [job.id for job in page.jobs]
        if (after := page.next) is None:
            break
    assert found == (expected[::-1] if newest else expected)


def test_pages_without_a_limit_go_back_in_time_to_the_first_job(store: SqlStore) -> None:
    with store.write() as tx:
        numbers = [tx.add(order(), NOON).id for _ in range(MOST_LISTED + 2)]

    latest = store.jobs(JobQuery(ended=True))
    earlier = store.jobs(JobQuery(ended=True, after=latest.next))

    assert [job.id for job in (*earlier.jobs, *latest.jobs)] == numbers
    assert (len(earlier.jobs), earlier.next, latest.total) == (2, None, len(numbers))
    assert len(ids(store)) == len(ids(store, state="queued")) == len(numbers)


def test_live_jobs_are_those_in_memory_and_the_others_are_read(store: SqlStore) -> None:
    over, live = ended(store), waiting(store)

    found = store.jobs(JobQuery(ended=True)).jobs

    assert found[1] is store.live_job(live.id)
    assert (found[0].id, found[0].outcome, found[0].leases) == (over.id, over.outcome, over.leases)
    assert ids(store) == [live.id]
    assert ids(store, user="nobody", ended=True) == []


def test_since_leaves_out_what_ended_before_and_no_job_that_lives(store: SqlStore) -> None:
    old = waiting(store)
    long, early, late = (ended(store, at=at) for at in (NOON, NOON - 2 * DAY, NOON))
    new = waiting(store)
    newest: dict[str, Any] = {"state": State.ENDED, "newest": True}

    assert ids(store, **newest, since=NOON - DAY) == [late.id, long.id]
    assert ids(store, **newest, since=NOON - DAY, after=late.id, limit=1) == [long.id]
    assert ids(store, **newest, since=NOON - 3 * DAY) == [late.id, early.id, long.id]
    assert ids(store, **newest, since=NOON + DAY) == []
    assert ids(store, ended=True, since=NOON - DAY) == [old.id, long.id, late.id, new.id]
    assert ids(store, ended=True, since=NOON + DAY) == [old.id, new.id]


@pytest.mark.parametrize("filters", [{"state": "ended", "newest": True}, {"ended": True}, {}])
@pytest.mark.parametrize("pattern", ["sweep*", "sweep-?", "*[!0-9]", "*[ab]", "Sweep*", "*", "*é"])
def test_a_name_matches_as_it_does_for_cancel(
    store: SqlStore, pattern: str, filters: dict[str, Any]
) -> None:
    names = ("sweep-a", "sweep-1", "sweep-10", "b", "été", "Sweep")
    made = {
        (ended(store, name=name) if filters else waiting(store, name)).id: name for name in names
    }

    found = ids(store, name=pattern, **filters)

    assert {made[each] for each in found} == {name for name in names if fnmatchcase(name, pattern)}


@pytest.mark.parametrize("everything", [True, False])
def test_a_name_that_is_hidden_cannot_be_found_by_a_pattern(
    store: SqlStore, *, everything: bool
) -> None:
    waiting(store, "secret")
    own = waiting(store, "secret", user="bob")

    assert ids(store, ended=everything, name="s*", name_of="bob") == [own.id]
    assert ids(store, ended=everything, name="s*", name_of="bob", user=ALICE.user) == []
    assert len(ids(store, ended=everything, name_of="bob")) == 2


def test_a_state_is_that_of_a_job_or_how_it_ended(store: SqlStore) -> None:
    live = waiting(store)
    exits = (SUCCESS, Exit(1), Exit(None, 9), None)
    jobs = [ended(store, outcome, known) for outcome in Outcome for known in exits]

    assert ids(store, state=FAILED) == [job.id for job in jobs if has_failed(job)]
    for outcome in Outcome:
        assert ids(store, state=outcome, newest=True) == [
            job.id for job in reversed(jobs) if job.outcome is outcome
        ]
    assert ids(store, state=State.QUEUED, ended=True) == [live.id]
    assert ids(store, state=State.ACTIVE) == []


def test_what_is_shown_is_what_the_job_was(store: SqlStore) -> None:
    job = ended(store, Outcome.TIME_LIMIT, None, name="train")

    (found,) = store.ended_jobs(JobQuery(job.owner.user, State.ENDED)).jobs

    assert (found.name, found.user, found.outcome) == ("train", job.owner.user, "time_limit")
    assert (found.submitted_at, found.granted_at, found.ended_at) == (NOON - DAY, NOON - DAY, NOON)
    assert (found.leased, found.is_hold, found.gpus) == (GIB, False, 1)
