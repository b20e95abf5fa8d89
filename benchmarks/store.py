"""The store: what a submission and a job's life cost, beside the same rows in raw sqlite3.

The floor has the same file, schema, settings and commits, and statements that are prepared once.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.domain.job import (
    Exit,
    Invocation,
    Job,
    Outcome,
    Owner,
    grant,
    worker_gone,
    worker_started,
)
from gpulease.domain.lease import Claim, Trigger
from gpulease.domain.placement import Placement
from gpulease.service.ports import Event, Submission
from gpulease.store.store import SqlStore

G = 1024**3
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GPU = GpuUuid("GPU-a")
TIMES = 300
AT_ONCE = 8
QUEUED = 10_000
_ENVIRONMENT = {f"VARIABLE_{number}": "x" * 60 for number in range(30)}
_ORDER = Submission(
    owner=Owner(1000, 1000, "alice"),
    name="true",
    command="true",
    claim=Claim(G),
    invocation=Invocation(("true",), "/home/alice", _ENVIRONMENT),
)


@contextmanager
def opened() -> Iterator[SqlStore]:
    with tempfile.TemporaryDirectory(prefix="gpulease-bench-") as name:
        store = SqlStore(Path(name) / "gpulease.db")
        with store.write() as tx:
            tx.add_gpus([GpuReading(GPU, 0, "A100", 80 * G)], NOON)
        yield store
        store.close()


def submit(store: SqlStore) -> Job:
    with store.write() as tx:
        return tx.add(_ORDER, NOON)


def life(store: SqlStore) -> None:
    """Submit, grant, start and end a job, a commit each."""
    job = submit(store)
    granted = grant(job, Placement(((GPU, G),)), NOON)
    started = worker_started(granted, 10, 9, NOON)
    assert started is not None
    ended = worker_gone(started, Trigger.WORKER_EXITED, Outcome.EXITED, None, Exit(0), NOON)
    assert ended is not None
    for step, trigger in (
        (granted, Trigger.GRANT),
        (started, Trigger.WORKER_STARTED),
        (ended, Trigger.WORKER_EXITED),
    ):
        with store.write() as tx:
            tx.save(step, Event(NOON, trigger))
