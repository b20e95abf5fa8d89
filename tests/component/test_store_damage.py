"""What can be read of a damaged database is read, and becomes a sound one."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import NOON, G, order, reading
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import Exit, Outcome, grant, worker_gone
from gpulease.domain.lease import State, Trigger
from gpulease.domain.placement import Placement
from gpulease.errors import RecordDamaged, RecordUnwritable, StateUnusable
from gpulease.service.ports import Event
from gpulease.store.database_file import KEPT, all_copies, back_up
from gpulease.store.recovery import SalvageCounts, is_sound, rebuild
from gpulease.store.salvage import Salvage, salvage
from gpulease.store.store import SqlStore
from gpulease.store.tables import Row

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
            held = grant(job, Placement(((GpuUuid("GPU-a"), G),)), NOON)
            tx.save(held, EVENT)
            if job.id > ENDED:
                break
            trigger = Trigger.WORKER_EXITED
            ended = worker_gone(held, trigger, Outcome.EXITED, None, Exit(0), NOON)
            assert ended is not None
            tx.save(ended, EVENT)
        tx.add(order(), NOON)
    store.close()
    return path


def recovered(path: Path, *copies: Path) -> tuple[SqlStore, SalvageCounts]:
    scratch = path.parent / "scratch"
    scratch.mkdir()
    model = copies[0] if copies else None
    found = salvage(path, scratch, model)
    others = []
    for number, copy in enumerate(copies):
        (scratch / str(number)).mkdir()
        others.append(salvage(copy, scratch / str(number), None))
    target = path.parent / "target.db"
    user_count = rebuild(target, found, others)
    assert is_sound(target)
    return SqlStore(target), user_count


def test_a_sound_file_comes_through_whole(tmp_path: Path) -> None:
    store, user_count = recovered(filled(tmp_path / "gpulease.db"))
    assert (user_count.broken, user_count.dropped, user_count.copied) == ([], {}, {})
    assert len(store.jobs(None, None, 1000)) == ENDED + 2
    assert [job.state for job in store.live()] == [State.GRANTED, State.QUEUED]
    assert store.invocation(store.live()[1].id).argv == ("true",)
    with store.write() as tx:
        assert tx.add(order(), NOON).id == ENDED + 3
    store.close()


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def spoil_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(100))


def spoil_all(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut_in_half, spoil_header, spoil_all])
def test_with_a_copy_nothing_that_is_in_it_is_lost(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    path = filled(tmp_path / "gpulease.db")
    copy = back_up(path)
    damage(path)
    with pytest.raises(StateUnusable):
        SqlStore(path)
    store, user_count = recovered(path, copy)
    assert len(store.jobs(None, None, 1000)) == ENDED + 2
    assert len(store.live()) == 2
    assert all(job.leases for job in store.jobs(None, None, 1000)[:-1])
    if damage is spoil_header:
        assert not user_count.copied, "only the header was missing"
    store.close()


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


def test_a_row_that_was_deleted_does_not_come_back_from_a_copy(tmp_path: Path) -> None:
    path = filled(tmp_path / "gpulease.db")
    copy = back_up(path)
    store = SqlStore(path)
    (_, waiting) = store.live()
    with store.write() as tx:
        gone = worker_gone(
            grant(waiting, Placement(((GpuUuid("GPU-a"), G),)), NOON),
            Trigger.WORKER_EXITED, Outcome.EXITED, None, Exit(3), NOON,
        )  # fmt: skip
        assert gone is not None
        tx.save(gone, EVENT)
    store.close()
    spoil_header(path)
    store, _ = recovered(path, copy)
    found = store.job(waiting.id)
    assert found is not None
    assert (found.state, found.exit) == (State.ENDED, Exit(3))
    store.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return filled(tmp_path_factory.mktemp("sound") / "gpulease.db").read_bytes()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(spots=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=5000)), max_size=4))
def test_whatever_is_broken_what_comes_out_is_sound(
    spots: list[tuple[float, bytes]], sound: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    content = bytearray(sound)
    for where, garbage in spots:
        at = int(where * (len(content) - 1))
        content[at : at + len(garbage)] = garbage
    path = folder / "gpulease.db"
    path.write_bytes(content[: len(sound)])
    store, _ = recovered(path)
    for job in store.jobs(None, None, 1000):
        store.events(job.id)
    store.close()


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


def test_what_came_before_the_newest_schema_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gpulease.db"
    released = Path(__file__).parents[1] / "data" / "0001.sql"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(released.read_text())
    assert isinstance(salvage(path, _new(tmp_path / "look"), None), Salvage)
    store, user_count = recovered(path)
    assert sorted({job.state for job in store.jobs(None, None, 100)}) == sorted(State)
    assert not user_count.dropped
    store.close()


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


@pytest.mark.parametrize("damage", [None, spoil_header, spoil_all])
def test_every_table_is_restored(damage: Callable[[Path], None] | None, tmp_path: Path) -> None:
    path = newest_release(tmp_path / "gpulease.db")
    recovered(path)[0].close()
    # The first recovery leaves out the invocations of ended jobs.
    shutil.move(tmp_path / "target.db", path)
    shutil.rmtree(tmp_path / "scratch")
    before = content(path)
    assert [name for name, rows in before.items() if not rows] == []
    copy = back_up(path)
    if damage is not None:
        damage(path)
    store, counts = recovered(path, copy)
    store.close()
    after = content(tmp_path / "target.db")
    if damage is spoil_all:
        del before[SEQUENCE], after[SEQUENCE]
    assert after == before
    assert counts.dropped == {}


def test_rows_that_cannot_be_read_are_left_out_with_what_refers_to_them(tmp_path: Path) -> None:
    path = newest_release(tmp_path / "gpulease.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        # Before the year 1, which is the first that Python reads.
        connection.execute(f"UPDATE jobs SET submitted_at = {-(2**62)}")
        connection.execute(f"UPDATE windows SET begins_at = {-(2**62)}")
        connection.execute(f"UPDATE gpu_events SET at = {-(2**62)}")
        connection.execute("UPDATE notifications SET event = 'x', job = NULL")
    store, counts = recovered(path)
    assert not (*store.jobs(None, None, 100), *store.windows())
    left = {name for name, rows in content(tmp_path / "target.db").items() if rows}
    assert left == {"properties", "gpus", "gpu_memory", SEQUENCE}
    assert counts.dropped.keys() == {"jobs", "windows", "gpu_events", "notifications", "job_memory"}
    store.close()


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory
