"""Makes a sound database of what was saved: the damaged file first, its copies for the rest."""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Engine, delete, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from gpulease.store.engine import WRITES, open_engine
from gpulease.store.faults import at_start
from gpulease.store.rows import job_of, unpack
from gpulease.store.salvage import Salvage
from gpulease.store.schema import bring_up_to_date, known_revisions, migrate
from gpulease.store.tables import EventRow, HolderRow, InvocationRow, JobRow, LeaseRow

_IN_ORDER = ("properties", "gpus", "jobs", "holders", "invocations", "leases", "pools", "events")
_HISTORY = "gpu_memory"
LEAP = 1000
"""Ids that are passed over where it is not known how many were given."""
_ORPHANS = ("events", "invocations", "holders", "pools", "leases")


@dataclass(slots=True)
class Tally:
    """What was saved, by table: rows of the damaged file, of its copies, and rows left out."""

    saved: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Tables of which rows may be missing."""


def is_sound(path: Path) -> bool:
    """Tell whether the file is a database in which nothing is broken and nothing dangles."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            return (
                connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
                and connection.execute("PRAGMA foreign_key_check").fetchone() is None
                and connection.execute("SELECT 1 FROM alembic_version").fetchone() is not None
            )
    except sqlite3.DatabaseError:
        return False


def rebuild(target: Path, damaged: Salvage, copies: Sequence[Salvage], taken: int = 0) -> Tally:
    """Write a new database at `target`; rows of `copies` only fill what `damaged` lost.

    Ids up to `taken` were given in any case, whatever the files say.

    Raises:
        StateUnusable, StateUnwritable: it cannot be written.
    """
    try:
        return _rebuild(target, damaged, copies, taken)
    except DatabaseError as error:
        raise at_start(target, error.orig) from error
    except sqlite3.DatabaseError as error:
        raise at_start(target, error) from error


def _rebuild(target: Path, damaged: Salvage, copies: Sequence[Salvage], taken: int) -> Tally:
    tally = Tally()
    revision = next((it.revision for it in (damaged, *copies) if it.revision), None)
    target.touch(mode=0o600)
    engine = open_engine(target)
    migrate(engine, revision if revision in known_revisions() else "head")
    engine.dispose()
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")  # It is synced as a whole, at its end.
        connection.execute("BEGIN")
        for name in (*_IN_ORDER, _HISTORY):
            _fill(connection, name, damaged, copies, tally)
        _mend(connection, tally)
        _pass_over_ids(connection, damaged, copies, taken)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    engine = open_engine(target)
    bring_up_to_date(target, engine)
    _drop_unreadable(engine, tally)
    engine.dispose()
    return tally


def _fill(
    connection: sqlite3.Connection,
    name: str,
    damaged: Salvage,
    copies: Sequence[Salvage],
    tally: Tally,
) -> None:
    table = damaged.tables.get(name)
    if table is not None:
        written = _insert(connection, name, table.columns, table.rows)
        _count(tally.saved, name, written)
        _count(tally.dropped, name, len(table.rows) - written)
        # A row that is not in a table that was read to its end was not there.
        if table.whole and written == len(table.rows):
            return
    tally.broken.append(name)
    for copy in copies:
        if (other := copy.tables.get(name)) is not None:
            written = _insert(connection, name, other.columns, other.rows)
            _count(tally.copied, name, written)


def _insert(
    connection: sqlite3.Connection,
    name: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> int:
    """Insert the rows that keep the rules and whose key is new; return how many."""
    known = {line[1] for line in connection.execute(f"PRAGMA table_info({name})")}
    places = [place for place, column in enumerate(columns) if column in known]
    names = ", ".join(f'"{columns[place]}"' for place in places)
    marks = ", ".join("?" * len(places))
    # The names are those of a table of ours.
    statement = f"INSERT INTO {name} ({names}) VALUES ({marks})"  # noqa: S608
    written = 0
    for row in rows:
        try:
            connection.execute(statement, [row[place] for place in places])
            written += 1
        except (sqlite3.IntegrityError, sqlite3.InterfaceError, OverflowError):
            continue
    return written


def _mend(connection: sqlite3.Connection, tally: Tally) -> None:
    """Leave nothing that points to what is not there; a GPU is known again by its lease."""
    connection.execute(
        "INSERT INTO gpus (uuid, gpu_index, name, first_seen_at, last_seen_at) "
        "SELECT gpu, 0, 'unknown GPU', min(granted_at), max(granted_at) FROM leases "
        "WHERE gpu NOT IN (SELECT uuid FROM gpus) GROUP BY gpu"
    )
    present = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    for name in _ORPHANS:
        if name in present:
            gone = connection.execute(
                f"DELETE FROM {name} WHERE job NOT IN (SELECT id FROM jobs)"  # noqa: S608
            )
            _count(tally.dropped, name, gone.rowcount)
    gone = connection.execute("DELETE FROM gpu_memory WHERE uuid NOT IN (SELECT uuid FROM gpus)")
    _count(tally.dropped, _HISTORY, gone.rowcount)
    connection.execute(
        "DELETE FROM invocations WHERE job IN (SELECT id FROM jobs WHERE state = 'ended')"
    )


def _pass_over_ids(
    connection: sqlite3.Connection, damaged: Salvage, copies: Sequence[Salvage], taken: int
) -> None:
    """See that no id that may have been given is given again."""
    told = [_sequence(it) for it in (damaged, *copies)]
    last = max([taken, *(number for number in told if number is not None)])
    for query in ("SELECT max(id) FROM jobs", "SELECT max(job) FROM events"):
        last = max(last, connection.execute(query).fetchone()[0] or 0)
    if told[0] is None:
        last += LEAP
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
    connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', ?)", (last,))


def _sequence(source: Salvage) -> int | None:
    table = source.tables.get("sqlite_sequence")
    for row in table.rows if table is not None else ():
        if row[0] == "jobs" and isinstance(row[1], int):
            return row[1]
    return None


def _drop_unreadable(engine: Engine, tally: Tally) -> None:
    """Remove what keeps the rules of the tables and yet means nothing."""
    writing = engine.connect().execution_options(**WRITES)
    with writing as connection, connection.begin(), Session(connection) as session:
        for job in session.scalars(select(JobRow.id)).all():
            if not _is_readable(session, job):
                for of_job in (EventRow, InvocationRow, HolderRow, LeaseRow):
                    session.execute(delete(of_job).where(of_job.job == job))
                session.execute(delete(JobRow).where(JobRow.id == job))
                _count(tally.dropped, "jobs", 1)
        for job in session.scalars(select(InvocationRow.job)).all():
            if not _is_launchable(session, job):
                session.execute(delete(InvocationRow).where(InvocationRow.job == job))
                _count(tally.dropped, "invocations", 1)


def _is_readable(session: Session, job: int) -> bool:
    try:
        row = session.get_one(JobRow, job)
        leases = session.scalars(select(LeaseRow).where(LeaseRow.job == job)).all()
        job_of(row, leases, session.get(HolderRow, job))
        session.scalars(select(EventRow).where(EventRow.job == job)).all()
        return True
    except Exception:  # noqa: BLE001  whatever it is, it is no job
        return False


def _is_launchable(session: Session, job: int) -> bool:
    try:
        unpack(session.get_one(InvocationRow, job))
        return True
    except Exception:  # noqa: BLE001  whatever it is, it is no invocation
        return False


def _count(tally: dict[str, int], name: str, number: int) -> None:
    if number > 0:
        tally[name] = tally.get(name, 0) + number
