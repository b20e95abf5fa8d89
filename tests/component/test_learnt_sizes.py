"""The sizes that a node publishes for commands of its users."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes import NOON, G, order, reading
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import Exit, JobUsage, Outcome, grant, worker_gone, worker_started
from gpulease.domain.lease import Trigger
from gpulease.domain.placement import Placement
from gpulease.fingerprint import CommandFingerprint
from gpulease.service.learnt_sizes import LearntSizes
from gpulease.service.ports import Event
from gpulease.store.store import SqlStore

GPU = GpuUuid("GPU-a")
UID = order().owner.uid


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus([reading("GPU-a")], NOON)
    yield opened
    opened.close()


def run(store: SqlStore, used: int, hour: int, *, exact: str = "exact", code: int = 0) -> None:
    """Run a job that used so many bytes, and ended at this hour."""
    usage = JobUsage(CommandFingerprint("similar", exact))
    at = NOON + timedelta(hours=hour)
    with store.write() as tx:
        job = tx.add(replace(order(8 * G), usage=usage), NOON)
        started = worker_started(grant(job, Placement(((GPU, 8 * G),)), NOON), 1, 2, NOON)
        assert started is not None
        tx.save(started, Event(NOON, Trigger.GRANT))
        measured = replace(
            started, leases=tuple(replace(lease, used=used) for lease in started.leases)
        )
        exit_ = Exit(code)
        ended = worker_gone(measured, Trigger.WORKER_EXITED, Outcome.EXITED, None, exit_, at)
        assert ended is not None
        tx.save(ended, Event(at, Trigger.WORKER_EXITED))


def refreshed(learnt: LearntSizes) -> dict[tuple[int, str], int]:
    asyncio.run(learnt.refresh())
    return dict(learnt.sizes)


async def at_once(call: Callable[[], Any]) -> Any:
    return call()


def test_a_command_has_a_size_for_its_arguments_and_one_for_similar_ones(store: SqlStore) -> None:
    learnt = LearntSizes(store, at_once, 10)
    assert refreshed(learnt) == {}
    run(store, 2 * G, 1)
    run(store, 4 * G, 2, exact="other")
    assert refreshed(learnt) == {
        (UID, "exact"): 2560 * G // 1024, (UID, "other"): 5 * G, (UID, "similar"): 5 * G,
    }  # fmt: skip
    run(store, 6 * G, 3)
    assert refreshed(learnt)[UID, "exact"] == 7 * G


def test_a_run_that_failed_teaches_nothing(store: SqlStore) -> None:
    run(store, G // 10, 1, code=1)
    assert refreshed(LearntSizes(store, at_once, 10)) == {}


def test_the_latest_sizes_are_kept(store: SqlStore) -> None:
    learnt = LearntSizes(store, at_once, 3)
    for hour in range(4):
        run(store, G, hour, exact=f"exact {hour}")
    assert set(refreshed(learnt)) == {(UID, "exact 2"), (UID, "similar"), (UID, "exact 3")}
