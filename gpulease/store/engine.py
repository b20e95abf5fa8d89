"""The database file: opened as SQLite should be for a record that must not be lost.

Write-ahead log, so that readers never wait for the writer; full synchronisation, so that what was
committed survives a power cut; foreign keys on. A write transaction begins IMMEDIATE: the database
is the one lock between writers.

What is wrong with the file when SQLite refuses: it passes, it is damaged, or it is not ours.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.exc import DatabaseError

from gpulease.errors import (
    GpuleaseError,
    RecordDamaged,
    RecordUnwritable,
    StateUnusable,
    StateUnwritable,
)

_BUSY_TIMEOUT_S = 10.0
_IMPATIENT_S = 0.1
_LOG = f"journal_size_limit={64 << 20}"
"""What is left of the write-ahead log's file after a time in which it had to grow."""
WRITES = {"gpulease_writes": True}
"""Execution option of a connection that is going to write."""


def open_engine(path: Path) -> Engine:
    """Return an engine on the database file at `path`, which may be empty."""

    def connect() -> sqlite3.Connection:
        # An empty file in the place of one that was removed would hide that it was.
        uri = f"file:{quote(str(path))}?mode=rw"
        return sqlite3.connect(uri, timeout=_BUSY_TIMEOUT_S, check_same_thread=False, uri=True)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # SQLAlchemy says BEGIN, see _begin; sqlite3 by itself would say it late, and DEFERRED.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", _LOG):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("gpulease_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def set_busy_timeout(connection: Connection, patient: bool) -> None:
    """Have `connection` wait for another process's lock on the file: some seconds, or hardly."""
    wait_s = _BUSY_TIMEOUT_S if patient else _IMPATIENT_S
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.execute(f"PRAGMA busy_timeout={round(wait_s * 1000)}")


_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PASSING = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
    }
)
_PRIMARY = 0xFF
"""Of an extended result code, see sqlite.org/rescode.html."""


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite says of the file of a running daemon into an error for users.

    Raises:
        RecordDamaged: the file is damaged.
        RecordUnwritable: anything else is wrong with it; that may pass.
    """
    try:
        yield
    except DatabaseError as error:
        may_be_the_file = isinstance(error.orig, sqlite3.OperationalError)
        if not may_be_the_file and _code(error.orig) not in _DAMAGED:
            raise  # a bug of ours
        raise unusable_error(path, error.orig) from error


def may_lack_space(error: DatabaseError) -> bool:
    """Tell whether more disk space might have helped; a quota shows as an input/output error."""
    return _code(error.orig) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def startup_error(path: Path, error: BaseException | None) -> GpuleaseError:
    """Return why a daemon cannot start with this file: StateUnwritable where that may pass."""
    code = _code(error)
    if code in _DAMAGED or code is None:
        return damaged(path, str(error))
    if code in _PASSING:
        return StateUnwritable(
            f"cannot use the database {path}: {error}",
            "see that the disk has room and nothing else holds the file; the file is untouched",
        )
    return StateUnusable(
        f"cannot use the database {path}: {error}",
        "see that this user can write the file and its directory, and that nothing makes them "
        "read-only",
    )


def damaged(path: Path, why: str) -> StateUnusable:
    """Return the refusal of a damaged file, with the way out."""
    return StateUnusable(
        f"cannot use the database {path}: {why}",
        f"save what can be saved: gpuleased recover --state {path.parent}; it deletes nothing, "
        "and running jobs go on",
    )


def unusable_error(path: Path, error: BaseException | None) -> RecordUnwritable:
    """Return what to tell those who use a running daemon."""
    if _code(error) in (*_DAMAGED, None):
        return RecordDamaged(
            f"cannot use the record {path}: {error}",
            f"an admin should stop gpuleased and run: gpuleased recover --state {path.parent}; "
            "running jobs go on meanwhile",
        )
    return RecordUnwritable(
        f"cannot write the record {path}: {error}",
        "an admin should see that the disk has room and nothing else holds the file; "
        "running jobs go on meanwhile",
    )


def _code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & _PRIMARY
