"""Disk space that belongs to the record: a file beside it, given back when there is no other.

So what must be stored (that a job ended, that one was cancelled, what others submit) can be stored
on a disk that somebody else has filled.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from gpulease.units import MIB

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
