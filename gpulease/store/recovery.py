"""Writes a sound database from what can be read of a damaged one and of its backups."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, delete, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import InstrumentedAttribute

from gpulease.domain.lease import State
from gpulease.store.database_file import SKIPPED_IDS
from gpulease.store.engine import WRITES, open_engine, startup_error
from gpulease.store.notifications import notification_of
from gpulease.store.rows import unpack
from gpulease.store.salvage import Salvage, Table
from gpulease.store.schema import bring_up_to_date, known_revisions, migrate
from gpulease.store.statements import jobs_of
from gpulease.store.tables import (
    EventRow,
    GpuEventRow,
    InvocationRow,
    JobMemoryRow,
    JobRow,
    NotificationRow,
    Row,
    WindowRow,
)
from gpulease.store.windows import window_of

_BATCH = 1000
_UNFIT = (sqlite3.IntegrityError, sqlite3.InterfaceError, OverflowError)
"""Errors of a row that the table does not take, apart from its constraints."""


@dataclass(slots=True)
class SalvageCounts:
    """Rows by table: saved from the damaged file, copied from backups, and dropped."""

    saved: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Tables in which rows may be missing."""


def is_sound(path: Path) -> bool:
    """Tell whether the file is a database without damage or dangling references."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            return (
                connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
                and connection.execute("PRAGMA foreign_key_check").fetchone() is None
                and connection.execute("SELECT 1 FROM alembic_version").fetchone() is not None
            )
    except sqlite3.DatabaseError:
        return False


def rebuild(
    target: Path, damaged: Salvage, copies: Sequence[Salvage], taken: int = 0
) -> SalvageCounts:
    """Write a new database at `target`; rows of `copies` replace those that `damaged` lost.

    Ids up to `taken` are not given again, even if no file has them.

    Raises:
        StateUnusable, StateUnwritable: it cannot be written.
    """
    try:
        return _rebuild(target, damaged, copies, taken)
    except DatabaseError as error:
        raise startup_error(target, error.orig) from error
    except sqlite3.DatabaseError as error:
        raise startup_error(target, error) from error


def _rebuild(
    target: Path, damaged: Salvage, copies: Sequence[Salvage], taken: int
) -> SalvageCounts:
    counts = SalvageCounts()
    revision = next((it.revision for it in (damaged, *copies) if it.revision), None)
    target.touch(mode=0o600)
    engine = open_engine(target)
    migrate(engine, revision if revision in known_revisions() else "head")
    engine.dispose()
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        # One transaction fills the file: its write-ahead log would be larger than the file.
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA synchronous=OFF")  # It is synced before it is put in place.
        connection.execute("BEGIN")
        tables = _tables(connection)
        for name in tables:
            _fill(connection, name, damaged, copies, counts)
        _repair_references(connection, tables, counts)
        _skip_ids(connection, damaged, copies, taken)
        connection.execute("COMMIT")
    engine = open_engine(target)
    bring_up_to_date(target, engine)
    _drop_unreadable(engine, counts)
    engine.dispose()
    return counts


def _tables(connection: sqlite3.Connection) -> list[str]:
    """Return all tables with content, those of later releases included."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    names = [name for (name,) in found if not name.startswith("sqlite_")]
    return [name for name in names if name != "alembic_version"]


def _fill(
    connection: sqlite3.Connection,
    name: str,
    damaged: Salvage,
    copies: Sequence[Salvage],
    counts: SalvageCounts,
) -> None:
    table = damaged.tables.get(name)
    if table is not None:
        read, written = _insert(connection, table)
        _count(counts.saved, name, written)
        _count(counts.dropped, name, read - written)
        # All rows of the table could be read: none are missing.
        if table.whole and written == read:
            return
    counts.broken.append(name)
    for copy in copies:
        if (other := copy.tables.get(name)) is not None:
            _count(counts.copied, name, _insert(connection, other)[1])


def _insert(connection: sqlite3.Connection, table: Table) -> tuple[int, int]:
    """Insert rows with a new key that meet the constraints; return how many were read and added."""
    known = {line[1] for line in connection.execute(f"PRAGMA table_info({table.name})")}
    places = [place for place, column in enumerate(table.columns) if column in known]
    names = ", ".join(f'"{table.columns[place]}"' for place in places)
    marks = ", ".join("?" * len(places))
    # The names are those of our schema.
    statement = f"INSERT OR IGNORE INTO {table.name} ({names}) VALUES ({marks})"  # noqa: S608
    read, before, rows = 0, connection.total_changes, table.rows()
    while batch := [[row[place] for place in places] for row in islice(rows, _BATCH)]:
        read += len(batch)
        try:
            connection.executemany(statement, batch)
        except _UNFIT:
            for row in batch:
                with suppress(*_UNFIT):
                    connection.execute(statement, row)
    return read, connection.total_changes - before


def _repair_references(
    connection: sqlite3.Connection, tables: Sequence[str], counts: SalvageCounts
) -> None:
    """Remove dangling references; restore GPUs that leases refer to."""
    connection.execute(
        "INSERT INTO gpus (uuid, gpu_index, name, first_seen_at, last_seen_at) "
        "SELECT gpu, 0, 'unknown GPU', min(granted_at), max(granted_at) FROM leases "
        "WHERE gpu NOT IN (SELECT uuid FROM gpus) GROUP BY gpu"
    )
    references = [
        (name, key[3], key[2], key[4])
        for name in tables
        for key in connection.execute(f"PRAGMA foreign_key_list({name})")
    ]
    for name, column, parent, key in references:
        gone = connection.execute(
            f"DELETE FROM {name} WHERE {column} NOT IN "  # noqa: S608
            f"(SELECT {key} FROM {parent} WHERE {key} IS NOT NULL)"
        )
        _count(counts.dropped, name, gone.rowcount)


def _skip_ids(
    connection: sqlite3.Connection, damaged: Salvage, copies: Sequence[Salvage], taken: int
) -> None:
    """Ensure that no id that may have been given is given again."""
    given = [_sequences(it) for it in (damaged, *copies)]
    last = {"jobs": taken}
    for name, number in [
        *(pair for each in given for pair in each.items()),
        *connection.execute("SELECT name, seq FROM sqlite_sequence"),
        ("jobs", connection.execute("SELECT max(job) FROM events").fetchone()[0] or 0),
    ]:
        last[name] = max(last.get(name, 0), number)
    if "jobs" not in given[0]:
        last["jobs"] += SKIPPED_IDS
    connection.execute("DELETE FROM sqlite_sequence")
    connection.executemany("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", last.items())


def _sequences(source: Salvage) -> dict[str, int]:
    """Return the last id that was given in each table that never gives one again."""
    table = source.tables.get("sqlite_sequence")
    rows = table.rows() if table is not None else ()
    known = Row.metadata.tables
    return {row[0]: row[1] for row in rows if row[0] in known and isinstance(row[1], int)}


def _drop_unreadable(engine: Engine, counts: SalvageCounts) -> None:
    """Remove rows that meet the constraints but cannot be read as what they are."""
    with engine.connect().execution_options(**WRITES) as connection, connection.begin():
        ended = select(JobRow.id).where(JobRow.state == State.ENDED)
        arrays = select(JobRow.array).where(JobRow.state != State.ENDED, JobRow.array.is_not(None))
        unused = InvocationRow.job.in_(ended) & InvocationRow.job.not_in(arrays)
        connection.execute(delete(InvocationRow).where(unused))
        last = -(2**63)
        while jobs := connection.scalars(
            select(JobRow.id).where(JobRow.id > last).order_by(JobRow.id).limit(_BATCH)
        ).all():
            last = jobs[-1]
            for job in _unreadable(connection, jobs):
                _delete_job(connection, job)
                _count(counts.dropped, "jobs", 1)
        # This table has no foreign key to jobs.
        gone = delete(JobMemoryRow).where(JobMemoryRow.job.not_in(select(JobRow.id)))
        _count(counts.dropped, "job_memory", connection.execute(gone).rowcount)
        for key, read in _CHECKED:
            _drop_rows(connection, key, read, counts)


_CHECKED: tuple[tuple[InstrumentedAttribute[int], Callable[[Any], object]], ...] = (
    (InvocationRow.job, lambda row: unpack(row.content)),
    (NotificationRow.id, notification_of),
    (WindowRow.id, window_of),
    (GpuEventRow.id, tuple),
)
"""How the rows of small tables are read, by their key."""


def _drop_rows(
    connection: Connection,
    key: InstrumentedAttribute[int],
    read: Callable[[Any], object],
    counts: SalvageCounts,
) -> None:
    table = key.class_.__table__
    for number in connection.scalars(select(key)).all():
        try:
            read(connection.execute(select(table).where(key == number)).one())
        except Exception:  # noqa: BLE001  whatever it is, it cannot be read
            connection.execute(delete(table).where(key == number))
            _count(counts.dropped, table.name, 1)


def _unreadable(connection: Connection, jobs: Sequence[int]) -> Sequence[int]:
    """Return which of these jobs cannot be read; halves find them."""
    try:
        jobs_of(connection, select(JobRow.id).where(JobRow.id.in_(jobs)))
        connection.execute(select(EventRow.__table__).where(EventRow.job.in_(jobs))).all()
        return ()
    except Exception:  # noqa: BLE001  whatever it is, it is no job
        if len(jobs) == 1:
            return jobs
        half = len(jobs) // 2
        first, second = jobs[:half], jobs[half:]
        return [*_unreadable(connection, first), *_unreadable(connection, second)]


def _delete_job(connection: Connection, job: int) -> None:
    """Delete a job and all rows that refer to it."""
    for table in Row.metadata.tables.values():
        for key in table.foreign_keys:
            if key.column is JobRow.__table__.c.id:
                connection.execute(delete(table).where(key.parent == job))
    connection.execute(delete(JobRow).where(JobRow.id == job))


def _count(counts: dict[str, int], name: str, number: int) -> None:
    if number > 0:
        counts[name] = counts.get(name, 0) + number
