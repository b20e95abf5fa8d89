"""What the queue learns from ended jobs is the same from memory and from the database."""

from dataclasses import replace
from datetime import timedelta

from fakes import (
    NOON,
    G,
    ended_job,
    granted_job,
    order,
    running_job,
)
from gpulease.domain.job import (
    CommandFingerprint,
    Job,
    JobUsage,
    Outcome,
)
from gpulease.domain.lease import Trigger
from gpulease.domain.memory_estimate import size_for
from gpulease.service.ports import Event, PastJob
from gpulease.store.store import SqlStore

HOUR = timedelta(hours=1)


def end(
    store: SqlStore, hours: int, utilization: int | None = None, bound: int | None = None
) -> Job:
    """Run a job for so long, which uses all that it may."""
    usage = JobUsage(CommandFingerprint("similar", "exact"))
    with store.write() as tx:
        job = tx.add(replace(order(2 * G, time_limit=9 * HOUR), usage=usage), NOON)
        job = replace(job, claim=replace(job.claim, memory_bound=bound))
        started = running_job(job, at=NOON + HOUR)
        started = replace(
            started, leases=tuple(replace(each, used=each.most) for each in started.leases)
        )
        tx.save(started, Event(NOON, Trigger.GRANT))
        at = NOON + HOUR * (1 + hours)
        ended = replace(ended_job(started, at=at), utilization=utilization)
        tx.save(ended, Event(at, Trigger.WORKER_EXITED))
    return ended


def test_a_restart_learns_what_the_daemon_had_learnt(store: SqlStore) -> None:
    for hours, utilization in ((3, 70), (1, None), (2, 0)):
        end(store, hours, utilization)
    learnt = store.take_released()
    assert [past.released_at for past in learnt] == [NOON + HOUR * hours for hours in (4, 2, 3)]
    assert store.take_released() == []
    assert store.past_jobs(NOON) == sorted(learnt, key=lambda past: past.released_at)
    assert store.past_jobs(NOON + 3 * HOUR + HOUR / 2) == [learnt[0]]
    assert learnt[0].memory == 2 * G


def test_a_job_with_a_range_teaches_no_size_above_its_bound(store: SqlStore) -> None:
    job = end(store, 1, bound=6 * G)
    with store.write() as tx:
        (run,) = tx.past_runs(job.owner.uid, CommandFingerprint("similar", "exact"), 1, 10)
    assert (run.leased, size_for([run])) == (6 * G, 6 * G)


def test_a_restart_knows_when_the_last_dependency_of_a_job_was_met(store: SqlStore) -> None:
    with store.write() as tx:
        job = tx.add(order(), NOON)
        tx.save(job, Event(NOON + 2 * HOUR, "dependency_met"))
        started = running_job(job, at=NOON + 3 * HOUR)
        tx.save(started, Event(NOON, Trigger.GRANT))
        tx.save(ended_job(started, at=NOON + 4 * HOUR), Event(NOON, Trigger.WORKER_EXITED))

    assert [past.eligible_at for past in store.past_jobs(NOON)] == [NOON + 2 * HOUR]


def test_jobs_that_never_held_memory_teach_nothing(store: SqlStore) -> None:
    with store.write() as tx:
        job = tx.add(order(), NOON)
    with store.write() as tx:
        ended = ended_job(granted_job(job), Outcome.LAUNCH_FAILED, None)
        tx.save(replace(ended, leases=(), granted_at=None), Event(NOON, Trigger.LAUNCH_FAILED))
    assert store.take_released() == []
    assert not store.past_jobs(NOON - HOUR)
    assert PastJob.of(job, None, NOON) is None
