"""The SQLite engine with the settings for durable data, and the translation of SQLite's errors.

Write-ahead log, so that readers never wait for the writer; full synchronisation, so that commits
survive a power failure; foreign keys on. A write transaction begins IMMEDIATE: the database is the
only lock between writers. An error of SQLite means a temporary condition, a damaged file, or a file
that is not a database of gpulease.
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
    RecordLocked,
    RecordUnwritable,
    StateUnusable,
    StateUnwritable,
)

_BUSY_TIMEOUT_S = 10.0
_SHORT_TIMEOUT_S = 0.1
_LOG = f"journal_size_limit={64 << 20}"
"""The size to which the file of the write-ahead log shrinks after it has grown."""
WRITES = {"gpulease_writes": True}
"""The execution option of a connection for writing."""
BEGINS_ITSELF = {"gpulease_begins": True}
"""The execution option of the connection on which `writer.Writer` begins transactions."""


def open_engine(path: Path) -> Engine:
    """Return an engine for the existing file at `path`, which may be empty."""

    def connect() -> sqlite3.Connection:
        # Without mode=rw, an empty file would be created in the place of a removed one.
        uri = f"file:{quote(str(path))}?mode=rw"
        return sqlite3.connect(uri, timeout=_BUSY_TIMEOUT_S, check_same_thread=False, uri=True)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # SQLAlchemy sends BEGIN, see _begin; sqlite3 itself would send it late, and DEFERRED.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", _LOG):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("gpulease_begins", False):
        writes = options.get("gpulease_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def driver_of(connection: Connection) -> sqlite3.Connection:
    """Return the connection of the sqlite3 module that is under one of SQLAlchemy."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def set_busy_timeout(driver: sqlite3.Connection, patient: bool) -> None:
    """Set how long a connection waits for another process's lock: 10 s if `patient`, else 0.1 s."""
    wait_s = _BUSY_TIMEOUT_S if patient else _SHORT_TIMEOUT_S
    driver.execute(f"PRAGMA busy_timeout={round(wait_s * 1000)}")


_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_TEMPORARY = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
    }
)
_PRIMARY = 0xFF
"""Masks the primary part of an extended result code; see sqlite.org/rescode.html."""


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate errors of SQLite about the file of a running daemon.

    Raises:
        RecordDamaged: the file is damaged.
        RecordUnwritable: any other problem with the file, which may be temporary.
    """
    try:
        yield
    except (DatabaseError, sqlite3.DatabaseError) as error:
        meaning = translated(path, error)
        if meaning is error:
            raise
        raise meaning from error


def translated(path: Path, error: DatabaseError | sqlite3.DatabaseError) -> Exception:
    """Return what an error means for users; itself if it is a bug in gpulease."""
    original = _original(error)
    may_be_the_file = isinstance(original, sqlite3.OperationalError)
    if not may_be_the_file and _code(original) not in _DAMAGED:
        return error
    return unusable_error(path, original)


def _original(error: BaseException) -> BaseException | None:
    """Return the error of the sqlite3 module that SQLAlchemy may have wrapped."""
    return error.orig if isinstance(error, DatabaseError) else error


def may_lack_space(error: DatabaseError | sqlite3.DatabaseError) -> bool:
    """Tell whether disk space may be missing; an exceeded quota is an input/output error."""
    return _code(_original(error)) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


_ABOUT_THE_FILE = _TEMPORARY | {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}


def may_be_damage(error: sqlite3.DatabaseError) -> bool:
    """Tell whether the content of the file may be the cause, and not what happens around it."""
    return _code(error) not in _ABOUT_THE_FILE


def startup_error(path: Path, error: BaseException | None) -> GpuleaseError:
    """Return the error for a daemon that cannot start; StateUnwritable if it may be temporary."""
    code = _code(error)
    if code in _DAMAGED or code is None:
        return damaged(path, str(error))
    if code in _TEMPORARY:
        return StateUnwritable(
            f"cannot use the database {path}: {error}",
            "check that the disk has space and no other program locks the file; it is unchanged",
        )
    return StateUnusable(
        f"cannot use the database {path}: {error}",
        "check that this user can write the file and its directory, and that neither is read-only",
    )


def damaged(path: Path, why: str) -> StateUnusable:
    """Return the error for a damaged file, with a hint how to recover it."""
    return StateUnusable(
        f"cannot use the database {path}: {why}",
        f"recover it with: gpuleased recover --state {path.parent}; this keeps a damaged file, "
        "and running jobs are not affected",
    )


def unusable_error(path: Path, error: BaseException | None) -> RecordUnwritable:
    """Return the error for users of a running daemon."""
    if _code(error) in (*_DAMAGED, None):
        return RecordDamaged(
            f"cannot use the database {path}: {error}",
            f"an admin should stop gpuleased and run: gpuleased recover --state {path.parent}; "
            "running jobs are not affected",
        )
    if _code(error) in _LOCKED:
        return RecordLocked(
            f"cannot write the database {path}: another program has locked it",
            f"an admin finds the program with: fuser {path}; running jobs are not affected",
        )
    return RecordUnwritable(
        f"cannot write the database {path}: {error}",
        "an admin should check that the disk has space and no other program locks the file; "
        "running jobs are not affected",
    )


def _code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & _PRIMARY
