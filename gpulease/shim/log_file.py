"""The log of one output stream: all of it while there is room, then its newest part.

Offsets are those of the stream: a file grows, and its oldest part becomes a hole, so the readable
part is always its last `limit` bytes, or fewer where the disk has no room for them. What cannot be
written is counted and said later; a log that fails never stops a job.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from errno import EDQUOT, ENOSPC, ENOSYS, EOPNOTSUPP

from gpulease.shim.linux import punch_hole
from gpulease.write_buffer import Conduit

_BLOCK = 4096
_SLACK = 16
"""A hole is punched when the file is over its limit by one part in so many."""
LEAST_KEPT = 256 << 10
"""Bytes at the end of a log that are kept however little room the disk has."""
_CHECK_EVERY = 256 << 10
"""Bytes that are written between two checks of the disk's free space."""
_SHORTENED = "the disk is nearly full: the oldest part of this output is removed"


class JobLog:
    """One log, of which we are the only writer."""

    def __init__(self, fd: int, limit: int, keep_free: int = 0) -> None:
        """`keep_free`: bytes of the disk that this log leaves free by removing its oldest part.

        The shim checks this itself, because a log grows faster than the daemon could look.
        """
        self._fd = fd
        self._limit = max(limit, _BLOCK)
        self._keep_free = keep_free
        self._unchecked = _CHECK_EVERY
        self._held_back = False
        self._shortened = False
        self._told_shortened = False
        self._size = os.fstat(fd).st_size
        self._freed = 0
        self._dropped = 0
        self._why = ""
        self._stopped = False
        self._dirty = False

    def write(self, piece: bytes | memoryview) -> None:
        """Append `piece`, or as much of it as can be."""
        if self._takes(len(piece)):
            self._dropped += len(piece) - self._append(piece)
            self._keep_to_limit()

    def pour(self, conduit: Conduit) -> None:
        """Append what `conduit` holds, or as much of it as can be; afterwards it is empty."""
        if self._takes(conduit.held):
            self._add(lambda _: conduit.pass_on(self._fd, self._size), conduit.held)
            self._dropped += conduit.held
            self._keep_to_limit()
        if conduit.held:
            conduit.clear()

    def tail(self, length: int) -> bytes:
        """Return at most the last `length` bytes."""
        start = max(self._size - length, self._freed, 0)
        try:
            return os.pread(self._fd, self._size - start, start)
        except OSError:
            return b""

    @property
    def is_mid_line(self) -> bool:
        """Whether the last line was begun and has no end yet."""
        return self.tail(1) not in (b"", b"\n")

    def finish(self) -> None:
        """Say what was dropped or removed, if there is room by now."""
        if self._shortened:
            # Again: the line that said so may be among what was removed.
            self._say(_SHORTENED)
        if self._dropped and not self._stopped:
            self._tell_dropped()

    def sync(self) -> None:
        """Wait until all of it is on disk, which may take seconds."""
        if self._dirty:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)

    def _takes(self, size: int) -> bool:
        """Tell whether so many bytes may be tried; those that may not are counted."""
        if self._stopped:
            return False
        if not self._leaves_room(size):
            self._dropped += size
            return False
        if self._shortened and not self._told_shortened:
            self._told_shortened = self._say(_SHORTENED)
        if self._dropped and not self._tell_dropped():
            self._dropped += size
            return False
        return True

    def _append(self, piece: bytes | memoryview) -> int:
        rest = memoryview(piece)
        return self._add(lambda done: os.pwrite(self._fd, rest[done:], self._size), len(piece))

    def _add(self, writer: Callable[[int], int], size: int) -> int:
        """Have `size` bytes written at the end, and return how many were."""
        done = 0
        while done < size:
            try:
                written = writer(done)
            except OSError as error:
                if error.errno in (ENOSPC, EDQUOT) and self._free_half():
                    continue
                self._why = error.strerror or str(error)
                break
            done += written
            self._size += written
            self._dirty = True
        return done

    def _tell_dropped(self) -> bool:
        count, self._dropped = self._dropped, 0
        if self._say(f"{count} bytes of output were dropped: {self._why}"):
            return True
        self._dropped = count
        return False

    def _say(self, sentence: str) -> bool:
        start = "\n" if self.is_mid_line else ""
        line = f"{start}[gpulease: {sentence}]\n".encode()
        size = self._size
        if self._append(line) == len(line):
            return True
        # Half a sentence is worse than none.
        os.ftruncate(self._fd, size)
        self._size = size
        return False

    def _keep_to_limit(self) -> None:
        if self._size - self._freed > self._limit + max(_BLOCK, self._limit // _SLACK):
            self._free_oldest()

    def _leaves_room(self, size: int) -> bool:
        """Tell whether `size` more bytes leave the disk free space; the oldest part makes way.

        A log that is short by now may grow on; one that cannot be shortened may not.
        """
        self._unchecked += size
        if self._unchecked >= _CHECK_EVERY:
            self._unchecked, self._held_back = 0, False
            while self._is_long and _free_space(self._fd) < self._keep_free + size:
                if not self._free_half():
                    self._why, self._held_back = os.strerror(ENOSPC), True
                    break
        return not self._held_back

    @property
    def _is_long(self) -> bool:
        return self._size - self._freed >= 2 * LEAST_KEPT

    def _free_half(self) -> bool:
        """Free the older half of what is kept, if that is not too little and can be done."""
        if not self._is_long or self._free_until((self._size + self._freed) // 2) is not None:
            return False
        self._shortened = True
        return True

    def _free_oldest(self) -> None:
        if self._free_until(self._size - self._limit) in (EOPNOTSUPP, ENOSYS):
            self._say("the log is full, and this file system cannot free its oldest part")
            self._stopped = True

    def _free_until(self, offset: int) -> int | None:
        """Give what is before `offset` back to the file system; return the errno of a failure."""
        end = offset // _BLOCK * _BLOCK
        try:
            punch_hole(self._fd, self._freed, end - self._freed)
        except OSError as error:
            return error.errno
        self._freed = end
        return None


def _free_space(fd: int) -> int:
    """Return how many bytes its user may still write to the file system of an open file."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize


def shorten(directory: int, name: str, keep: int) -> None:
    """Free all but the last `keep` bytes of a log that its shim may be writing at this moment.

    `directory` is the job's, open. What is no plain file of ours is left alone.

    Raises:
        OSError: there is no such log, or the file system cannot free a part of a file.
    """
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        found = os.fstat(fd)
        end = (found.st_size - max(keep, LEAST_KEPT)) // _BLOCK * _BLOCK
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and end > 0:
            punch_hole(fd, 0, end)
    finally:
        os.close(fd)
