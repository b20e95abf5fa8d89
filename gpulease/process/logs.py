"""The log of one output stream: all of it while there is room, then its newest part.

Offsets are those of the stream: a file grows, and its oldest part becomes a hole, so the readable
part is always its last `limit` bytes. What cannot be written is counted and said later; a log
that fails never stops a job.
"""

import os
from errno import ENOSYS, EOPNOTSUPP

from gpulease.process.linux import punch_hole

_BLOCK = 4096
_SLACK = 16
"""A hole is punched when the file is over its limit by one part in so many."""


class JobLog:
    """One log, open for appending."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd = fd
        self._limit = max(limit, _BLOCK)
        self._size = os.fstat(fd).st_size
        self._freed = 0
        self._dropped = 0
        self._why = ""
        self._at_line_start = True
        self._stopped = False
        self._dirty = False

    def write(self, piece: bytes | memoryview) -> None:
        """Append `piece`, or as much of it as can be."""
        if self._stopped:
            return
        if self._dropped and not self._tell_dropped():
            self._dropped += len(piece)
            return
        self._dropped += len(piece) - self._append(piece)
        if self._size - self._freed > self._limit + max(_BLOCK, self._limit // _SLACK):
            self._free_oldest()

    def tail(self, length: int) -> bytes:
        """Return at most the last `length` bytes."""
        start = max(self._size - length, self._freed, 0)
        try:
            return os.pread(self._fd, self._size - start, start)
        except OSError:
            return b""

    def finish(self) -> None:
        """Say what was dropped, if there is room by now, and wait until the rest is on disk."""
        if self._dropped and not self._stopped:
            self._tell_dropped()
        if self._dirty:
            try:
                os.fsync(self._fd)
            except OSError:
                self._dirty = False

    def _append(self, piece: bytes | memoryview) -> int:
        rest = memoryview(piece)
        while rest:
            try:
                written = os.write(self._fd, rest)
            except OSError as error:
                self._why = error.strerror or str(error)
                break
            self._size += written
            self._dirty = True
            self._at_line_start = rest[written - 1] == ord("\n")
            rest = rest[written:]
        return len(piece) - len(rest)

    def _tell_dropped(self) -> bool:
        count, self._dropped = self._dropped, 0
        if self._say(f"{count} bytes of output were dropped: {self._why}"):
            return True
        self._dropped = count
        return False

    def _say(self, sentence: str) -> bool:
        start = "" if self._at_line_start else "\n"
        line = f"{start}[gpulease: {sentence}]\n".encode()
        size = self._size
        if self._append(line) == len(line):
            return True
        # Half a sentence is worse than none.
        os.ftruncate(self._fd, size)
        self._size = size
        self._at_line_start = not start
        return False

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
