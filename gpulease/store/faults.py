"""What is wrong with the file when SQLite refuses: it passes, it is damaged, or it is not ours."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DatabaseError

from gpulease.errors import (
    GpuleaseError,
    RecordDamaged,
    RecordUnwritable,
    StateUnusable,
    StateUnwritable,
)

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
def told(path: Path) -> Iterator[None]:
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
        raise told_of(path, error.orig) from error


def may_lack_space(error: DatabaseError) -> bool:
    """Tell whether more disk space might have helped; a quota shows as an input/output error."""
    return _code(error.orig) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def at_start(path: Path, error: BaseException | None) -> GpuleaseError:
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


def told_of(path: Path, error: BaseException | None) -> RecordUnwritable:
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
