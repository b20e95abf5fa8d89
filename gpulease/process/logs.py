"""The log of one output stream: all of it while there is room, then its newest part.

Offsets are those of the stream: a file grows, and its oldest part becomes a hole, so the readable
part is always its last `limit` bytes. What cannot be written is counted and said later; a log
that fails never stops a job.
"""

import contextlib
import os
from collections.abc import Callable
from errno import ENOSYS, EOPNOTSUPP

from gpulease.conduit import Conduit
from gpulease.process.linux import punch_hole

_BLOCK = 4096
_SLACK = 16
"""A hole is punched when the file is over its limit by one part in so many."""


class JobLog:
    """One log, of which we are the only writer."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd = fd
        self._limit = max(limit, _BLOCK)
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
        """Say what was dropped, if there is room by now."""
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

    def _free_oldest(self) -> None:
        end = (self._size - self._limit) // _BLOCK * _BLOCK
        try:
            punch_hole(self._fd, self._freed, end - self._freed)
        except OSError as error:
            if error.errno in (EOPNOTSUPP, ENOSYS):
                self._say("the log is full, and this file system cannot free its oldest part")
                self._stopped = True
            return
        self._freed = end
