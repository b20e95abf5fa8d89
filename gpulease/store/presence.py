"""Whether the database that is open is the file at its path, and what happens if it is not.

SQLite goes on with a file that was removed as if nothing had happened, and all that it commits is
gone with the process. So each write transaction makes sure of the file, before and after.
"""

import logging
import os
import sqlite3
from pathlib import Path

from sqlalchemy import Engine, event

from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.store.schema import copy_open_database

_log = logging.getLogger(__name__)

KEPT = "removed.backup"
"""The ending of the copy that is made of a file that is not at its path any more."""


class Presence:
    """Makes sure that the database that is open is the file at its path."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._path = path
        self._log_path = path.with_name(f"{path.name}-wal")
        self._engine = engine
        self._identity: tuple[int, int] | None = None
        event.listen(engine, "connect", self._refuse_another, insert=True)
        self._is_kept = False
        """Whether there is a copy of what another file has replaced."""
        self._open()

    def _refuse_another(self, _connection: object, _record: object) -> None:
        """Keep new connections from another file, whose log would be ours by its name."""
        if self._identity is not None and _identity(self._path) != self._identity:
            raise sqlite3.OperationalError("another file was put in its place")

    def _open(self) -> None:
        # Held for good: as long as one connection is open, what was removed can be read.
        self._held = self._engine.raw_connection()
        connection = self._held.driver_connection
        assert isinstance(connection, sqlite3.Connection)
        self._connection = connection
        # Only now the log is open as well.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        self._identity = _identity(self._path)

    def close(self) -> None:
        """Let go of the file."""
        self._held.close()

    def ensure(self) -> None:
        """Return if the file is at its path; one that was removed is put back there.

        Nobody else of this process may write meanwhile.

        Raises:
            RecordDamaged: another file is there.
            RecordUnwritable: none is there, and it cannot be put back.
        """
        found = _identity(self._path)
        if found == self._identity:
            self._is_kept = False
            if not self._log_path.exists():
                self._begin_new_log()
            return
        copy = self._path.with_name(f"{self._path.name}.{KEPT}")
        try:
            if found is None:
                self._put_back(copy)
                return
            if not self._is_kept:
                copy_open_database(self._connection, copy)
                # What is in the log would be played into the other file, which has the same name.
                told = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self._is_kept = told[0] == 0
        except (OSError, sqlite3.Error) as error:
            what = "it was removed" if found is None else "it was replaced by another file"
            raise RecordUnwritable(
                f"cannot write the record {self._path}: {what}, and cannot be copied: {error}",
                "an admin should see that its directory is there and has room for it; "
                "running jobs go on meanwhile",
            ) from error
        raise RecordDamaged(
            f"cannot use the record {self._path}: another file was put in its place",
            f"an admin should put the former file back, or stop gpuleased and move {copy} there; "
            "running jobs go on meanwhile",
        )

    def _put_back(self, copy: Path) -> None:
        copy_open_database(self._connection, copy)
        # A log of the file that was removed would be played into the one that is put back.
        for end in ("-wal", "-shm"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        # Another file that has come there meanwhile stays.
        os.link(copy, self._path)
        copy.unlink()
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._open_again()
        _log.warning("the record %s was removed while in use, and is put back", self._path)

    def _begin_new_log(self) -> None:
        """Bring what is in a log that was removed into the database, and begin another."""
        busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise RecordUnwritable(f"cannot write the record {self._path}: its log was removed")
        self._open_again()
        _log.warning("%s was removed while in use; nothing is lost", self._log_path)

    def _open_again(self) -> None:
        former, self._identity = self._held, None
        self._engine.dispose()
        self._open()
        former.invalidate()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
