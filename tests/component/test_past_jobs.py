"""What the queue learns from ended jobs is the same from memory and from the database."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from fakes import NOON, G, order, reading
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import (
    CommandFingerprint,
    Job,
    JobUsage,
    Outcome,
    grant,
    worker_gone,
    worker_started,
)
from gpulease.domain.lease import Trigger
from gpulease.domain.placement import Placement
from gpulease.service.ports import Event, PastJob
from gpulease.store.store import SqlStore

HOUR = timedelta(hours=1)
GPU = GpuUuid("GPU-a")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus([reading("GPU-a")], NOON)
    yield opened
    opened.close()


def end(store: SqlStore, hours: int, utilization: int | None = None) -> Job:
    """Run a job for so long."""
    usage = JobUsage(CommandFingerprint("similar", "exact"))
    with store.write() as tx:
        job = tx.add(replace(order(2 * G, time_limit=9 * HOUR), usage=usage), NOON)
        granted = grant(job, Placement(((GPU, 2 * G),)), NOON + HOUR)
        started = worker_started(granted, 1, 2, NOON + HOUR)
        assert started is not None
        tx.save(started, Event(NOON, Trigger.GRANT))
        at = NOON + HOUR * (1 + hours)
        ended = worker_gone(started, Trigger.WORKER_EXITED, Outcome.EXITED, None, None, at)
        assert ended is not None
        ended = replace(ended, utilization=utilization)
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


def test_jobs_that_never_held_memory_teach_nothing(store: SqlStore) -> None:
    with store.write() as tx:
        job = tx.add(order(), NOON)
    with store.write() as tx:
        ended = worker_gone(
            grant(job, Placement(((GPU, G),)), NOON),
            Trigger.LAUNCH_FAILED,
            Outcome.LAUNCH_FAILED,
            None,
            None,
            NOON,
        )
        assert ended is not None
        tx.save(replace(ended, leases=(), granted_at=None), Event(NOON, Trigger.LAUNCH_FAILED))
    assert store.take_released() == []
    assert not store.past_jobs(NOON - HOUR)
    assert PastJob.of(job, None, NOON) is None
