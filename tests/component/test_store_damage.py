"""A damaged database is found, and replaced by its newest sound copy and the jobs' records."""

import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import (
    NOON,
    ended_job,
    granted_job,
    order,
    reading,
)
from gpulease.config import Settings
from gpulease.daemon.recover import recover, surviving_jobs
from gpulease.domain.job import Exit, Outcome
from gpulease.domain.lease import State
from gpulease.domain.queue_options import QueueOptions
from gpulease.errors import RecordDamaged, RecordUnwritable, StateUnusable, StateUnwritable
from gpulease.host.processes import MARKER
from gpulease.service.job_list import JobQuery
from gpulease.service.ports import Event
from gpulease.shim.record import claim
from gpulease.store.database_file import KEPT, all_copies, back_up, is_sound
from gpulease.store.store import SqlStore
from gpulease.store.tables import Row
from gpulease.worker.environment import HOOK_VARIABLE
from process_rig import PATH, end_shim, shell, start

EVENT = Event(NOON, "test")
ENDED = 300
SEQUENCE = "sqlite_sequence"


def filled(path: Path) -> Path:
    """Make a database of 300 ended jobs, one that runs and one that waits."""
    store = SqlStore(path)
    with store.write() as tx:
        tx.add_gpus([reading()], NOON)
        for _ in range(ENDED + 1):
            job = tx.add(order(), NOON)
            tx.save(held := granted_job(job), EVENT)
            if job.id <= ENDED:
                tx.save(ended_job(held), EVENT)
        tx.add(order(), NOON)
    store.close()
    return path


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def spoil_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(100))


def spoil_all(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def test_a_job_that_an_index_lacks_stops_the_start(tmp_path: Path) -> None:
    path = filled(tmp_path / "gpulease.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        query = "SELECT * FROM sqlite_master WHERE name = 'ix_jobs_live'"
        index = connection.execute(query).fetchone()
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("DELETE FROM sqlite_master WHERE name = 'ix_jobs_live'")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE jobs SET state = 'queued', ended_at = NULL WHERE id = 1")
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", index)
    with pytest.raises(StateUnusable, match="index of jobs"):
        SqlStore(path)


def test_a_damaged_history_does_not_stop_the_start_and_is_not_copied(tmp_path: Path) -> None:
    path = filled(tmp_path / "gpulease.db")
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'events'"
        (page,) = connection.execute(query).fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(os.urandom(4096))
    store = SqlStore(path)
    assert len(store.live()) == 2
    store.close()
    with pytest.raises(RecordDamaged):
        back_up(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("sound") / "gpulease.db")


def test_the_last_copies_are_kept_and_a_damaged_file_replaces_none(tmp_path: Path) -> None:
    path = filled(tmp_path / "gpulease.db")
    for number in range(1, 6):
        assert back_up(path).name == f"gpulease.db.auto-{number}.backup"
    names = [f"gpulease.db.auto-{number}.backup" for number in (5, 4, 3)]
    assert [copy.name for copy in all_copies(path)] == names
    assert len(names) == KEPT
    spoil_all(path)
    with pytest.raises(RecordUnwritable):
        back_up(path)
    assert [copy.name for copy in all_copies(path)] == names
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["gpulease.db", *names])


def newest_release(path: Path) -> Path:
    """Make a database with rows in every table, of the newest schema in tests/data."""
    newest = max((Path(__file__).parents[1] / "data").glob("*.sql"))
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(newest.read_text())
    SqlStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO properties VALUES ('installation', 'this')")
    return path


def content(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(sqlite3.connect(path)) as connection:
        queries = {name: f"SELECT * FROM {name}" for name in (*Row.metadata.tables, SEQUENCE)}
        return {
            name: sorted(connection.execute(query), key=repr) for name, query in queries.items()
        }


def recovered(directory: Path) -> str:
    """Recover the database in a state directory, and return what is said."""
    return "\n".join(recover(Settings(state=directory)))


@pytest.mark.parametrize("damage", [cut_in_half, spoil_header, spoil_all, Path.unlink])
def test_everything_is_as_in_the_copy(damage: Callable[[Path], object], tmp_path: Path) -> None:
    path = newest_release(tmp_path / "gpulease.db")
    back_up(path)
    before = content(path)
    assert [name for name, rows in before.items() if not rows] == []
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE jobs SET name = 'later'")
    damage(path)
    recovered(tmp_path)
    after = content(path)
    # No number is given again that a job after the copy may have got.
    assert dict(after.pop(SEQUENCE))["jobs"] > dict(before.pop(SEQUENCE))["jobs"]
    assert after == before
    assert path.stat().st_mode & 0o777 == 0o600
    SqlStore(path).close()


def test_an_older_copy_is_used_where_newer_ones_are_damaged_or_not_known(tmp_path: Path) -> None:
    path = filled(tmp_path / "gpulease.db")
    used, unknown, broken = back_up(path), back_up(path), back_up(path)
    with closing(sqlite3.connect(unknown)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'of a later release'")
    spoil_header(broken)
    spoil_all(path)
    said = recovered(tmp_path)
    assert f"restored from {used.name}" in said
    for copy in (unknown, broken):
        assert f"{copy.name} is not used" in said
    store = SqlStore(path)
    assert [job.state for job in store.live()] == [State.GRANTED, State.QUEUED]
    assert store.invocation(store.live()[1].id).argv == ("true",)
    store.close()


def test_a_copy_of_an_older_schema_is_migrated(tmp_path: Path) -> None:
    copy = tmp_path / "gpulease.db.auto-1.backup"
    released = Path(__file__).parents[1] / "data" / "0001.sql"
    with closing(sqlite3.connect(copy)) as connection:
        connection.executescript(released.read_text())
    recovered(tmp_path)
    store = SqlStore(tmp_path / "gpulease.db")
    assert sorted({job.state for job in store.jobs(JobQuery(ended=True)).jobs}) == sorted(State)
    store.close()


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpulease.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE of_another_program (a)")
    before = path.read_bytes()
    with pytest.raises(StateUnusable, match="not a database of gpulease"):
        recovered(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_locked_database_is_not_replaced_by_its_copy(tmp_path: Path) -> None:
    path = filled(tmp_path / "gpulease.db")
    back_up(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StateUnwritable, match="locked"):
            recovered(tmp_path)
    assert not list(tmp_path.glob("*.damaged-*"))


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(spots=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=5000)), max_size=4))
def test_whatever_is_broken_what_comes_out_is_sound(
    spots: list[tuple[float, bytes]], sound: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    whole = sound.read_bytes()
    broken = bytearray(whole)
    for where, garbage in spots:
        at = int(where * (len(broken) - 1))
        broken[at : at + len(garbage)] = garbage
    path = folder / "gpulease.db"
    for name, written in (("", broken), (".auto-1.backup", whole), (".auto-2.backup", broken)):
        path.with_name(path.name + name).write_bytes(written[: len(whole)])
    said = recovered(folder)
    assert is_sound(path)
    store = SqlStore(path)
    if "is intact" not in said:
        assert [job.state for job in store.live()] == [State.GRANTED, State.QUEUED]
        assert len(store.jobs(JobQuery(ended=True)).jobs) == ENDED + 2
    store.close()


@pytest.mark.parametrize(("column", "garbage"), [("user", b"\xff\xfe"), ("submitted_at", -(2**62))])
def test_a_value_that_is_none_is_damage_where_a_start_reads_it(
    column: str, garbage: object, tmp_path: Path
) -> None:
    path = filled(tmp_path / "gpulease.db")
    back_up(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        value = "CAST(? AS TEXT)" if isinstance(garbage, bytes) else "?"
        connection.execute(f'UPDATE jobs SET "{column}" = {value}', (garbage,))
    recovered(tmp_path)
    store = SqlStore(path)
    assert [job.owner.user for job in store.live()] == ["alice", "alice"]
    store.close()


@contextmanager
def launched(state: Path, job: int, *events: Mapping[str, object]) -> Iterator[None]:
    """Make the directory and the record of a launched job, whose shim lives within."""
    directory = state / "jobs" / str(job)
    directory.mkdir(parents=True)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(os.fspath(directory / "socket"))
    descriptor = os.open(directory, os.O_RDONLY)
    record = claim(descriptor, os.getpid())
    os.close(descriptor)
    assert record is not None
    record.append(*events)
    yield
    record.close()


def started(at: datetime) -> Mapping[str, object]:
    """Return the line of a record that says so; the pids are of processes without children."""
    return {"event": "started", "pid": 2, "shim_pid": 2, "started_at": at.isoformat()}


def exited(reason: str, at: datetime, code: int | None = None) -> Mapping[str, object]:
    return {"event": "exited", "reason": reason, "exit_code": code, "ended_at": at.isoformat()}


def test_a_job_that_ended_after_the_copy_is_not_queued_again(tmp_path: Path) -> None:
    """The former daemon has queued it again: what continues it may run, or may have ended."""
    path = tmp_path / "gpulease.db"
    store = SqlStore(path)
    with store.write() as tx:
        tx.add_gpus([reading()], NOON)
        again = replace(order(), queue=QueueOptions(requeue=True, preemptible=True))
        jobs = [tx.add(again, NOON) for _ in range(3)]
        for job in jobs[:2]:
            tx.save(granted_job(job), EVENT)
    store.close()
    back_up(path)
    spoil_all(path)
    later = datetime.now(UTC)
    with launched(tmp_path, 1, started(NOON), exited("preempted", later)):
        pass
    with launched(tmp_path, 3, started(later), exited("exited", later, 9)):
        pass
    # Killed while the machine ran: its record says nothing of its end.
    with launched(tmp_path, 2, started(later)):
        pass
    with launched(tmp_path, 7, started(later), exited("exited", later, 8)):
        pass
    recovered(tmp_path)
    store = SqlStore(path)
    found = {job.id: job for job in store.jobs(JobQuery(ended=True)).jobs}
    assert found.keys() == {1, 2, 3, 7}, "nothing was queued again"
    assert (found[1].outcome, found[1].state) == (Outcome.PREEMPTED, State.ENDED)
    assert (found[3].outcome, found[3].exit) == (Outcome.EXITED, Exit(9))
    assert (found[7].outcome, found[7].exit) == (Outcome.EXITED, Exit(8))
    assert found[7].owner.uid == os.geteuid()
    assert found[2].holds_memory
    assert not found[2].queue.requeue
    store.close()


def test_a_job_that_was_extended_after_the_copy_is_not_ended(tmp_path: Path) -> None:
    path, now = tmp_path / "gpulease.db", datetime.now(UTC)
    store = SqlStore(path)
    with store.write() as tx:
        tx.add_gpus([reading()], NOON)
        for _ in range(2):
            job = tx.add(order(time_limit=timedelta(hours=1)), NOON)
            tx.save(granted_job(job), EVENT)
    store.close()
    back_up(path)
    path.unlink()
    with (
        launched(tmp_path, 1, started(now - timedelta(hours=2))),
        launched(tmp_path, 2, started(now)),
    ):
        recovered(tmp_path)
    store = SqlStore(path)
    assert [job.claim.time_limit for job in store.live()] == [None, timedelta(hours=1)]
    store.close()


def test_a_running_job_that_came_after_the_copy_is_known_from_its_processes(
    tmp_path: Path,
) -> None:
    gpu = {"uuid": "GPU-a", "index": 0, "name": "A", "memory": 1 << 30}
    leased = PATH | {MARKER: "lab/17", HOOK_VARIABLE: json.dumps({"gpus": [gpu]})}
    directory = tmp_path / "jobs" / "17"
    directory.mkdir(mode=0o711, parents=True)
    try:
        start(shell(directory, "exec sleep 1000", environment=leased))
        (seen,) = surviving_jobs(directory.parent)
        recovered(tmp_path)
    finally:
        end_shim(directory)
    assert seen.found is not None
    assert (seen.installation, seen.alive) == ("lab", True)
    assert [(lease.gpu, lease.memory) for lease in seen.found.leases] == [("GPU-a", 1 << 30)]
    with closing(SqlStore(tmp_path / "gpulease.db")) as store:
        assert [job.id for job in store.live()] == [17]
        assert store.installation() == "lab", "its processes are known as those of this daemon"
