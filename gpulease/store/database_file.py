"""Whether the database that is open is the file at its path, and what happens if it is not.

SQLite goes on with a file that was removed as if nothing had happened, and all that it commits is
gone with the process. So each write transaction makes sure of the file, before and after.

Disk space that belongs to the record: a file beside it, given back when there is no other.

So what must be stored (that a job ended, that one was cancelled, what others submit) can be stored
on a disk that somebody else has filled.

Copies of the database beside it, made while the daemon runs: something to go back to.

Numbered and not dated, since the clock may be set: the highest is the newest. Migrations leave
copies of their own, which are never removed.
"""

import logging
import os
import re
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Engine, event

from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.store.engine import unusable_error
from gpulease.store.schema import copy_database, copy_open_database
from gpulease.units import MIB

_log = logging.getLogger(__name__)

REMOVED_COPY = "removed.backup"
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
        copy = self._path.with_name(f"{self._path.name}.{REMOVED_COPY}")
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


_MOST = 32 * MIB
"""A day of a busy machine: what one job writes to the record takes some KiB."""
_PART = 16
"""Of a small disk, the reserve is at most one part in so many."""
_NEEDED = 4
"""A transaction may need one part in so many of the reserve; with less free space it is taken."""


class Reserve:
    """A file that keeps disk space for the database beside it."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}.reserve")

    @property
    def missing(self) -> int:
        """How many bytes the reserve lacks; 0 while it is whole."""
        with suppress(OSError):
            size = self._size()
            return 0 if self._held() >= size else size
        return 0

    def lay(self, leave: int) -> None:
        """Make the reserve whole if that leaves `leave` bytes free."""
        with suppress(OSError):
            size = self._size()
            if self._held() >= size or self._free() < size + leave:
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._path, flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)

    def release_in_need(self) -> None:
        """Give the reserve back if there may be too little space for a transaction without it."""
        with suppress(OSError):
            if self._free() < self._size() // _NEEDED:
                self.release()

    def release(self) -> None:
        """Give the reserve back to the disk, and so to the database."""
        with suppress(OSError):
            if self._held():
                os.truncate(self._path, 0)

    def _held(self) -> int:
        try:
            return self._path.lstat().st_size
        except FileNotFoundError:
            return 0

    def _size(self) -> int:
        return min(_MOST, shutil.disk_usage(self._path.parent).total // _PART)

    def _free(self) -> int:
        return shutil.disk_usage(self._path.parent).free


KEPT = 3
_NAME = re.compile(r"\.auto-(\d+)\.backup")


def back_up(path: Path) -> Path:
    """Copy the database at `path` to a file beside it, and remove all but the newest `KEPT`.

    Takes its time; the daemon may write meanwhile.

    Raises:
        RecordDamaged: the database is damaged; the copies there are stay.
        RecordUnwritable: there is no room, or the like.
    """
    _refuse_the_last_room(path)
    made = _made(path)
    target = path.with_name(f"{path.name}.auto-{made[-1][0] + 1 if made else 1}.backup")
    try:
        copy_database(path, target)
    except sqlite3.DatabaseError as error:
        raise unusable_error(path, error) from error
    except OSError as error:
        raise RecordUnwritable(f"cannot copy the record {path}: {error.strerror}") from error
    for _, old in _made(path)[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def newest(path: Path) -> Path | None:
    """Return the copy made last, by the daemon."""
    made = _made(path)
    return made[-1][1] if made else None


def all_copies(path: Path) -> list[Path]:
    """Return every copy of the database at `path`, the newest first; by migrations last."""
    own = [copy for _, copy in reversed(_made(path))]
    others = [each for each in path.parent.glob(f"{path.name}.*.backup") if each not in own]
    return own + sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)


def last_job(path: Path) -> int:
    """Return the highest id of a job that the copies of the database at `path` know of."""
    last = 0
    for copy in all_copies(path):
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(copy)) as connection:
            query = "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"
            last = max(last, *(int(seq) for (seq,) in connection.execute(query)))
    return last


def _made(path: Path) -> list[tuple[int, Path]]:
    found = []
    for each in path.parent.glob(f"{path.name}.auto-*.backup"):
        if number := _NAME.fullmatch(each.name.removeprefix(path.name)):
            found.append((int(number[1]), each))
    return sorted(found)


def _refuse_the_last_room(path: Path) -> None:
    """Leave room for the record itself: the copy is what can wait."""
    try:
        size, free = path.stat().st_size, shutil.disk_usage(path.parent).free
    except OSError as error:
        raise RecordUnwritable(f"cannot copy the record {path}: {error.strerror}") from error
    if free < 2 * size:
        raise RecordUnwritable(
            f"cannot copy the record {path}: it would take half of the room that is left",
            "an admin should make room on its disk",
        )
