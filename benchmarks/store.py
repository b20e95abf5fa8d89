"""The store: what a submission and a job's life cost, beside the same rows in raw sqlite3.

The floor has the same file, schema, settings and commits, and statements that are prepared once.
"""

import sqlite3
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
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


class Floor:
    """The rows of the same job, written with the sqlite3 module alone."""

    def __init__(self, store: SqlStore) -> None:
        life(store)
        self._file = sqlite3.connect(store.path, isolation_level=None)
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            self._file.execute(f"PRAGMA {pragma}")
        self._job = self._row("SELECT * FROM jobs")
        self._job["state"], self._job["ended_at"], self._job["id"] = "queued", None, None
        self._lease = self._row("SELECT * FROM leases")
        self._lease["released_at"] = None
        self._content = zlib.compress(b"x" * 2000, level=0)[:700]

    def _row(self, query: str) -> dict[str, Any]:
        found = self._file.execute(f"{query} LIMIT 1")
        return dict(zip((each[0] for each in found.description), found.fetchone(), strict=True))

    def submit(self) -> int:
        self._file.execute("BEGIN IMMEDIATE")
        number = self._insert("jobs", self._job)
        self._insert("invocations", {"job": number, "content": self._content})
        return self._commit(number, "submitted")

    def life(self) -> None:
        number = self.submit()
        self._file.execute("BEGIN IMMEDIATE")
        self._insert("leases", self._lease | {"job": number})
        self._change(number, "state = 'granted', granted_at = 5")
        self._commit(number, "grant")
        self._file.execute("BEGIN IMMEDIATE")
        self._change(number, "state = 'active', started_at = 5, pid = 10, shim_pid = 9")
        self._commit(number, "worker_started")
        self._file.execute("BEGIN IMMEDIATE")
        self._change(number, "state = 'ended', ended_at = 5, outcome = 'exited', exit_code = 0")
        self._file.execute("UPDATE leases SET released_at = granted_at WHERE job = ?", (number,))
        self._file.execute("DELETE FROM invocations WHERE job = ?", (number,))
        self._commit(number, "worker_exited")

    def _insert(self, table: str, row: dict[str, Any]) -> int:
        names = ", ".join(f'"{name}"' for name in row)
        values = ", ".join(f":{name}" for name in row)
        done = self._file.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", row)
        return done.lastrowid or 0

    def _change(self, number: int, what: str) -> None:
        self._file.execute(f"UPDATE jobs SET {what} WHERE id = ?", (number,))

    def _commit(self, number: int, kind: str) -> int:
        event = number, 5, kind, None
        self._file.execute("INSERT INTO events (job, at, kind, detail) VALUES (?, ?, ?, ?)", event)
        self._file.execute("COMMIT")
        return number


@dataclass(frozen=True)
class Cost:
    """Of one call, in milliseconds."""

    time: float
    cpu: float


def costs(*calls: Callable[[], object], times: int = TIMES) -> list[Cost]:
    """Return what each call costs: medians of alternating repetitions."""
    spent: list[list[tuple[float, float]]] = [[] for _ in calls]
    for _ in range(times):
        for call, mine in zip(calls, spent, strict=True):
            begun = time.perf_counter(), time.process_time()
            call()
            mine.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    medians = (
        [statistics.median(each) * 1e3 for each in zip(*mine, strict=True)] for mine in spent
    )
    return [Cost(*each) for each in medians]


def _together(store: SqlStore) -> None:
    with store.batch():
        for _ in range(AT_ONCE):
            submit(store)


def run() -> Iterator[Figure]:
    """Measure the writes of a job beside raw sqlite3, and a submission behind 10,000."""
    raw = "raw sqlite3"
    with opened() as store:
        floor = Floor(store)
        ours, theirs = costs(lambda: life(store), floor.life)
        yield Figure("CPU of the store for a job's life", ours.cpu, "ms", 3, theirs.cpu, raw)
        yield Figure("a job's life in four commits", ours.time, "ms", 2.5, theirs.time, raw)
        one, eight, theirs = costs(lambda: submit(store), lambda: _together(store), floor.submit)
        each = "a submission by each of eight at once"
        yield Figure("a submission", one.time, "ms", 2.5, theirs.time, raw)
        yield Figure(each, eight.time / AT_ONCE, "ms", 1, theirs.time, f"{raw}, one commit each")
        yield Figure(f"CPU for {each}", eight.cpu / AT_ONCE, "ms", 1.5, theirs.cpu, raw)
    with opened() as empty, opened() as full:
        with full.write() as tx:
            for _ in range(QUEUED):
                tx.add(_ORDER, NOON)
        ours, theirs = costs(lambda: submit(full), lambda: submit(empty))
        what = f"one more submission behind {QUEUED}"
        yield Figure(what, ours.time, "ms", 1.1, theirs.time, "on an empty queue")
        yield Figure(f"CPU of {what}", ours.cpu, "ms", 1.1, theirs.cpu, "on an empty queue")
