"""The database file on disk: whether it is still there, reserved disk space, and backups.

SQLite continues to use a file that was removed, and everything it commits is lost with the process.
So each write transaction checks the file, before and after.

A file beside the database reserves disk space. It is released when the disk is full, so that the
end of a job, a cancellation or a submission can still be stored.

Backups are made while the daemon runs. They are numbered, not dated, since the clock may be set:
the highest number is the newest. Backups made by migrations are never removed.
"""

import logging
import os
import re
import shutil
import sqlite3
from collections import deque
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, event

from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.store.engine import (
    BEGINS_ITSELF,
    driver_of,
    may_be_damage,
    startup_error,
    unusable_error,
)
from gpulease.store.schema import copy_database, copy_open_database, read_revision
from gpulease.units import MIB

_log = logging.getLogger(__name__)

REMOVED_COPY = "removed.backup"
"""The suffix of the copy of a database that is no longer at its path."""
_SKIPPED_IDS = 1000
"""Ids to skip if the last id given is unknown."""


class FilePresence:
    """Keeps a connection open, and ensures that its database is the file at its path."""

    connection: Connection
    """It begins no transactions by itself."""
    driver: sqlite3.Connection
    """The same."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._path = path
        self._log_path = path.with_name(f"{path.name}-wal")
        self._paths = os.fspath(path), os.fspath(self._log_path)
        self._engine = engine
        self._identity: tuple[int, int] | None = None
        event.listen(engine, "connect", self._refuse_another, insert=True)
        self._is_kept = False
        """Whether a replaced database has been copied."""
        self._open()

    def _refuse_another(self, _connection: object, _record: object) -> None:
        """Refuse to connect to another file, whose write-ahead log would have the same name."""
        if self._identity is not None and _identity(self._path) != self._identity:
            raise sqlite3.OperationalError("another file was put in its place")

    def _open(self) -> None:
        # Kept open: with one open connection, a removed file can still be read.
        self.connection = self._engine.connect().execution_options(**BEGINS_ITSELF)
        self.driver = driver_of(self.connection)
        # Only this opens the write-ahead log too.
        self.driver.execute("SELECT count(*) FROM sqlite_master").fetchone()
        self._identity = _identity(self._path)

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def is_there(self) -> bool:
        """Tell whether the open database is the file at its path, and its log exists."""
        path, log = self._paths
        return _identity(path) == self._identity and _identity(log) is not None

    def ensure(self) -> None:
        """Ensure that the file is at its path; a removed file is restored there.

        Nothing else in this process may write meanwhile.

        Raises:
            RecordDamaged: another file is there.
            RecordUnwritable: the file is missing and cannot be restored.
        """
        # As text: this runs before and after each commit.
        path, log = self._paths
        found = _identity(path)
        if found == self._identity:
            self._is_kept = False
            if _identity(log) is None:
                self._begin_new_log()
            return
        copy = self._path.with_name(f"{self._path.name}.{REMOVED_COPY}")
        try:
            if found is None:
                self._restore(copy)
                return
            if not self._is_kept:
                copy_open_database(self.driver, copy)
                # Otherwise SQLite would apply the log to the other file, which has the same name.
                checkpoint = self.driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self._is_kept = checkpoint[0] == 0
        except (OSError, sqlite3.Error) as error:
            what = "it was removed" if found is None else "it was replaced by another file"
            raise RecordUnwritable(
                f"cannot write the database {self._path}: {what}, and cannot be copied: {error}",
                "an admin should check that its directory exists and has space; "
                "running jobs are not affected",
            ) from error
        raise RecordDamaged(
            f"cannot use the database {self._path}: another file was put in its place",
            f"an admin should restore the former file, or stop gpuleased and move {copy} there; "
            "running jobs are not affected",
        )

    def _restore(self, copy: Path) -> None:
        copy_open_database(self.driver, copy)
        # Otherwise SQLite would apply the log of the removed file to the restored one.
        for end in ("-wal", "-shm"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        # Does not replace another file that has been created there meanwhile.
        os.link(copy, self._path)
        copy.unlink()
        sync(self._path.parent)
        self._open_again()
        _log.warning("the database %s was removed while in use and has been restored", self._path)

    def _begin_new_log(self) -> None:
        """Write the contents of a removed log to the database, and begin a new log."""
        busy, *_ = self.driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise RecordUnwritable(f"cannot write the database {self._path}: its log was removed")
        self._open_again()
        _log.warning("%s was removed while in use; no data was lost", self._log_path)

    def _open_again(self) -> None:
        former, self._identity = self.connection, None
        self._engine.dispose()
        self._open()
        former.invalidate()
        former.close()


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


_MOST = 32 * MIB
"""Enough for a day on a busy machine: one job takes some KiB."""
_DISK_PART = 16
"""The reserve is at most this part of the disk: one sixteenth."""
_NEEDED = 4
"""The reserve is released if less than this part of it, one fourth, is free on the disk."""


class DiskReserve:
    """A file that reserves disk space for the database beside it."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}.reserve")
        self._directory = os.fspath(database.parent)

    @property
    def missing(self) -> int:
        """The missing bytes of the reserve; 0 if it is complete."""
        with suppress(OSError):
            size = self._size()
            return 0 if self._held() >= size else size
        return 0

    def refill(self, leave: int) -> None:
        """Complete the reserve if that leaves `leave` bytes free."""
        with suppress(OSError):
            size = self._size()
            if self._held() >= size or shutil.disk_usage(self._directory).free < size + leave:
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._path, flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)

    def release_if_needed(self) -> None:
        """Release the reserve if there may be too little space for a transaction."""
        with suppress(OSError):
            disk = shutil.disk_usage(self._directory)
            if disk.free < min(_MOST, disk.total // _DISK_PART) // _NEEDED:
                self.release()

    def release(self) -> None:
        """Release the reserved space for the database."""
        with suppress(OSError):
            if self._held():
                os.truncate(self._path, 0)

    def _held(self) -> int:
        try:
            return self._path.lstat().st_size
        except FileNotFoundError:
            return 0

    def _size(self) -> int:
        return min(_MOST, shutil.disk_usage(self._directory).total // _DISK_PART)


KEPT = 3
_NAME = re.compile(r"\.auto-(\d+)\.backup")


def sync(path: Path) -> None:
    """Have the kernel write a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def back_up(path: Path) -> Path:
    """Copy the database at `path` to a file beside it, and remove all but the newest `KEPT`.

    May take long; the daemon may write meanwhile.

    Raises:
        RecordDamaged: the database is damaged; existing backups are kept.
        RecordUnwritable: the backup cannot be written, for example for lack of space.
    """
    _check_space(path)
    backups = _numbered(path)
    target = path.with_name(f"{path.name}.auto-{backups[-1][0] + 1 if backups else 1}.backup")
    try:
        copy_database(path, target)
    except sqlite3.DatabaseError as error:
        raise unusable_error(path, error) from error
    except OSError as error:
        raise RecordUnwritable(f"cannot back up the database {path}: {error.strerror}") from error
    for _, old in _numbered(path)[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def newest(path: Path) -> Path | None:
    """Return the newest backup by the daemon; None if there is none."""
    backups = _numbered(path)
    return backups[-1][1] if backups else None


def all_copies(path: Path) -> list[Path]:
    """Return all backups of the database at `path`, the newest first, then migrations'."""
    own = [copy for _, copy in reversed(_numbered(path))]
    others = [each for each in path.parent.glob(f"{path.name}.*.backup") if each not in own]
    return own + sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)


_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of a damaged file; the second if SQLite's message quotes a damaged name."""


def is_sound(path: Path, revisions: Collection[str] | None = None) -> bool:
    """Tell whether the file is a database of gpulease without damage; None: of any revision.

    Raises:
        StateUnusable, StateUnwritable: it cannot be read now, for example if it is locked.
    """
    try:
        with closing(sqlite3.connect(path)) as connection:
            if connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                return False
            if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
                return False
            found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if found is None or (revisions is not None and found[0] not in revisions):
                return False
            # SQLite does not check that text is text.
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ):
                deque(connection.execute(f'SELECT * FROM "{name}"'), maxlen=0)  # noqa: S608
            return True
    except UnicodeDecodeError:
        return False
    except sqlite3.DatabaseError as error:
        if may_be_damage(error):
            return False
        raise startup_error(path, error) from error


def refuse_other_database(path: Path) -> None:
    """Refuse a database of another program at `path`, if it can be read.

    Raises:
        StateUnusable: it is one.
    """
    if path.exists():
        with suppress(*_UNREADABLE), closing(sqlite3.connect(path)) as connection:
            read_revision(path, connection)


def last_possible_id(path: Path, taken: int) -> int:
    """Return an id that no job is above, if the database at `path` is lost; 0 if there is none.

    Args:
        path: the database; its backups are beside it.
        taken: the highest id that is known to have been given.
    """
    last = taken
    for copy in all_copies(path):
        with suppress(*_UNREADABLE), closing(sqlite3.connect(copy)) as connection:
            query = (
                "SELECT seq FROM sqlite_sequence WHERE name = 'jobs' AND typeof(seq) = 'integer'"
            )
            last = max([last, *(seq for (seq,) in connection.execute(query))])
    return last + _SKIPPED_IDS if last else 0


def _numbered(path: Path) -> list[tuple[int, Path]]:
    found = []
    for each in path.parent.glob(f"{path.name}.auto-*.backup"):
        if number := _NAME.fullmatch(each.name.removeprefix(path.name)):
            found.append((int(number[1]), each))
    return sorted(found)


def _check_space(path: Path) -> None:
    """Refuse a backup that would leave too little space for the database itself."""
    try:
        size, free = path.stat().st_size, shutil.disk_usage(path.parent).free
    except OSError as error:
        raise RecordUnwritable(f"cannot back up the database {path}: {error.strerror}") from error
    if free < 2 * size:
        raise RecordUnwritable(
            f"cannot back up the database {path}: the backup would take half of the free space",
            "an admin should free space on its disk",
        )
