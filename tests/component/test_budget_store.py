"""What a job costs the database: statements, commits and flushes to the disk."""

import asyncio
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from fakes import NOON, FakeClock, order, reading
from gpulease.daemon.worker_threads import WriterThread
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Exit, Job, Outcome, UsageBy
from gpulease.domain.lease import State
from gpulease.domain.queue_options import Indices
from gpulease.service import jobs, scheduler, submission
from gpulease.service.job_list import FAILED, JobQuery
from gpulease.service.observation import Observation
from gpulease.service.ports import Policy, WorkerExited, WorkerStarted
from gpulease.service.queue_state import QueueState
from gpulease.store.retention import Retention
from gpulease.store.store import SqlStore
from gpulease.store.usage import UsageTotals

SEEN = Observation((reading(),), {}, NOON)
CLOCK, POLICY = FakeClock(), Policy()
TESTS = Path(__file__).parents[1]


@contextmanager
def statements(store: SqlStore) -> Iterator[list[str]]:
    """Collect the statements that the database gets, on the connection that writes or another."""
    sent: list[str] = []
    read: list[str] = []
    driver = store._writer._presence.driver

    def note(_: object, __: object, statement: str, *___: object) -> None:
        read.append(statement)

    driver.set_trace_callback(sent.append)
    event.listen(store.engine, "before_cursor_execute", note)
    yield sent
    event.remove(store.engine, "before_cursor_execute", note)
    driver.set_trace_callback(None)
    written = [each.partition("VALUES")[0] for each in sent]
    # Statements of SQLAlchemy on the connection that writes are in both.
    sent += [each for each in read if each.partition("VALUES")[0] not in written]


def verbs(sent: list[str]) -> list[str]:
    return [" ".join(each.split()[:3]).partition("(")[0] for each in sent]


@contextmanager
def plans(store: SqlStore) -> Iterator[list[str]]:
    """Collect how SQLite reads what it is asked for."""
    asked: list[tuple[str, Any]] = []
    steps: list[str] = []

    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        asked.append((statement, parameters))

    event.listen(store.engine, "before_cursor_execute", note)
    yield steps
    event.remove(store.engine, "before_cursor_execute", note)
    with store.engine.connect() as connection:
        for statement, parameters in asked:
            one = parameters[0] if isinstance(parameters, list) else parameters
            found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", one)
            steps += [str(row[3]) for row in found]


def submit(store: SqlStore, state: QueueState, key: str | None = None) -> Job:
    return submission.submit(store, replace(order(), key=key), SEEN, POLICY, CLOCK, state)


def start(store: SqlStore, job: JobId) -> None:
    jobs.note_started(store, job, WorkerStarted(10, 9, NOON))


def end(store: SqlStore, job: JobId) -> None:
    jobs.note_exited(store, job, WorkerExited(Outcome.EXITED, Exit(0), NOON))


def test_a_notification_is_one_statement_in_the_commit_of_what_it_is_about(store: SqlStore) -> None:
    for events, number in ((), 0), (("start",), 0), (("end", "fail"), 1):
        job = submission.submit(
            store, replace(order(), notify=events), SEEN, POLICY, CLOCK, QueueState(store)
        )
        scheduler.reconcile(store, SEEN, POLICY, CLOCK)
        start(store, job.id)
        with statements(store) as sent:
            end(store, job.id)
        assert verbs(sent).count("INSERT INTO notifications") == number
        assert verbs(sent).count("COMMIT") == 1
        assert "notifications" not in "".join(sent) or number


def test_the_end_of_a_whole_array_is_one_notification_announced_once(store: SqlStore) -> None:
    announced: list[int] = []
    store.announced = lambda: announced.append(1)
    indices = Indices(tuple(range(100)))
    with store.write() as tx:
        tx.add_array(replace(order(), indices=indices, notify=("end",)), indices, NOON)
    jobs.cancel_all(store, lambda _: True, lambda _: "me", CLOCK)
    with store.engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM notifications").scalar()
    assert (found, announced) == (1, [1])


def test_the_life_of_a_job_is_21_statements_in_four_commits(store: SqlStore) -> None:
    state = QueueState(store)
    scheduler.reconcile(store, SEEN, POLICY, CLOCK, state=state)
    with statements(store) as sent:
        job = submit(store, state)
        decided = scheduler.reconcile(store, SEEN, POLICY, CLOCK, state=state)
        assert [granted for granted, _ in decided.grants] == [job.id]
        store.invocation(job.id)
        start(store, job.id)
        end(store, job.id)
        # The queue learns from the end.
        scheduler.reconcile(store, SEEN, POLICY, CLOCK, state=state)
    assert verbs(sent).count("COMMIT") == 4
    assert len(sent) == 21


def test_a_pass_that_decides_nothing_and_a_status_ask_the_database_nothing(
    store: SqlStore,
) -> None:
    state = QueueState(store)
    waiting, ended = submit(store, state), submit(store, state)
    jobs.cancel(store, ended.id, "alice", CLOCK)
    closed = "the queue is paused"
    scheduler.reconcile(store, SEEN, POLICY, CLOCK, closed, state=state)
    with statements(store) as sent:
        scheduler.reconcile(store, SEEN, POLICY, CLOCK, closed, state=state)
        store.live(), store.job(waiting.id), store.job(ended.id), store.invocation(waiting.id)
        store.drained(), store.pause(), store.availabilities(), store.windows()
    assert sent == []


def test_the_start_of_an_array_element_asks_the_database_nothing(store: SqlStore) -> None:
    indices = Indices((0, 1, 2))
    with store.write() as tx:
        first, _, last = tx.add_array(replace(order(), indices=indices), indices, NOON)
    # The array's invocation has the id of its first element.
    jobs.cancel(store, first.id, "alice", CLOCK)
    with statements(store) as sent:
        store.invocation(last.id)
    assert sent == []


def test_submissions_that_gather_are_committed_together(store: SqlStore) -> None:
    state = QueueState(store)
    writer = WriterThread("writer", store.batch, longest_batch_s=60)
    free = threading.Event()

    async def all_at_once() -> list[Job]:
        busy = writer(free.wait)
        calls = [writer(lambda: submit(store, state)) for _ in range(8)]
        free.set()
        await busy
        return [await call for call in calls]

    with statements(store) as sent:
        queued = asyncio.run(all_at_once())
    writer.close()
    assert store.live() == tuple(queued)
    assert verbs(sent).count("COMMIT") == 1
    # Each is the three rows and the point to which it alone can be rolled back.
    assert len(sent) == 2 + 8 * 4 - 1


def test_one_more_submission_copies_nothing_that_grows_with_the_queue(store: SqlStore) -> None:
    state = QueueState(store)
    submit(store, state)

    def peak() -> int:
        tracemalloc.start()
        submit(store, state)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    alone = peak()
    with store.write() as tx:
        for _ in range(3000):
            tx.add(order(), NOON)
    # A copy of 3,000 references would be 24 kB.
    assert min(peak() for _ in range(3)) < alone + 12_000


def test_a_year_of_history_is_not_searched_row_by_row(store: SqlStore) -> None:
    job = submit(store, QueueState(store))
    with plans(store) as steps:
        for state in (None, *State, FAILED, *Outcome):
            store.jobs(JobQuery("alice", state, ended=True, limit=100))
            store.jobs(JobQuery(None, state, ended=True, since=NOON, newest=True, limit=100))
        for live in set(State) - {State.ENDED}:
            store.jobs(JobQuery(None, live, limit=100))
        store.jobs(JobQuery(limit=100)), store.jobs(JobQuery(array=job.id, ended=True))
        store.ended_jobs(JobQuery(state=State.ENDED, since=NOON, newest=True, after=9, limit=100))
        store.events(job.id), store.past_jobs(NOON), store.ended([job.id])
        UsageTotals(store).totals(UsageBy.USER, None, NOON, NOON)
        UsageTotals(store).predictions(None, NOON)
        UsageTotals(store).waits(NOON)
        Retention(store).expired(NOON, 1000)
        SqlStore(store.path).close()
    tables = {step for step in steps if step.startswith("SCAN") and "INDEX" not in step}
    assert not {step.split()[1] for step in tables} & {"jobs", "leases", "events", "invocations"}


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here")
def test_a_commit_flushes_the_disk_once(tmp_path: Path) -> None:
    script = f"""
    import sys
    sys.path.insert(0, {str(TESTS)!r})
    from pathlib import Path
    from fakes import NOON, order
    from gpulease.store.store import SqlStore

    store = SqlStore(Path({str(tmp_path)!r}) / "gpulease.db")
    with store.write() as tx:
        tx.add(order(), NOON)
    open("/dev/null").close()  # shows in the trace where counting begins
    for _ in range(5):
        with store.write() as tx:
            tx.add(order(), NOON)
    with store.batch():
        for _ in range(8):
            with store.write() as tx:
                tx.add(order(), NOON)
    open("/dev/null").close()
    """
    log = tmp_path / "trace"
    traced = ["strace", "-f", "-o", str(log), "-e", "trace=openat,fsync,fdatasync"]
    command = [*traced, sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(TESTS.parent)})
    _, counted, _ = log.read_text().split('"/dev/null"')
    assert counted.count("sync(") == 6
