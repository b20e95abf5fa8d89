"""The standard streams of a worker: its output, which is logged and shown, and its input.

A log keeps all output while there is room, and then its newest part. Offsets are those of the
stream: the file grows and its oldest part becomes a hole, so the readable part is always its last
`limit` bytes, or fewer where the disk has no room for them. Output that cannot be written is
counted, and the log says so later. A log that fails never stops a job.
"""

from __future__ import annotations

import os
import stat
from errno import EDQUOT, ENOSPC, ENOSYS, EOPNOTSUPP

from gpulease.event_loop import EventLoop, WriteBuffer
from gpulease.shim.clients import ShimClient, ShimClients
from gpulease.shim.linux import punch_hole
from gpulease.wire.frames import FrameKind, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_KEPT = 256 << 10
"""Bytes at the end of a log that are kept even if the disk is full."""
_BLOCK = 4096
_SLACK = 16
"""A log is shortened when it exceeds its limit by one part in this many."""
_CHECK_EVERY = 256 << 10
"""Bytes written between two checks of the free space."""
_SHORTENED = "the disk is nearly full: the oldest part of this output was removed"


class JobLog:
    """The log of one output stream. Only this object writes to the file."""

    def __init__(self, fd: int, limit: int, keep_free: int = 0) -> None:
        """Append to the file that is open as `fd`, and keep its last `limit` bytes.

        The log removes its oldest part to leave `keep_free` bytes of the disk free. The shim checks
        this itself, because a log grows faster than the daemon could check.
        """
        self._fd = fd
        self._limit = max(limit, _BLOCK)
        self._keep_free = keep_free
        self._unchecked = _CHECK_EVERY
        self._disk_is_full = False
        self._is_shortened = False
        self._said_shortened = False
        self._size = os.fstat(fd).st_size
        self._freed = 0
        self._dropped = 0
        self._why_dropped = ""
        self._is_stopped = False
        self._is_dirty = False

    def write(self, piece: bytes | memoryview) -> None:
        """Append `piece`, or as much of it as possible."""
        if self._may_write(len(piece)):
            self._dropped += len(piece) - self._append(piece)
            if self._size - self._freed > self._limit + max(_BLOCK, self._limit // _SLACK):
                self._free_over_limit()

    def tail(self, length: int) -> bytes:
        """Return at most the last `length` bytes."""
        start = max(self._size - length, self._freed, 0)
        try:
            return os.pread(self._fd, self._size - start, start)
        except OSError:
            return b""

    @property
    def is_mid_line(self) -> bool:
        """Whether the last line is incomplete."""
        return self.tail(1) not in (b"", b"\n")

    def finish(self) -> None:
        """Say what was dropped or removed, if there is room now."""
        if self._is_shortened:
            # Again: the first message may be in the part that was removed.
            self._say(_SHORTENED)
        if self._dropped and not self._is_stopped:
            self._say_dropped()

    def sync(self) -> None:
        """Wait until the log is on disk, which may take seconds."""
        if self._is_dirty:
            try:
                os.fsync(self._fd)
            except OSError:
                pass  # a log that fails never stops a job

    def _may_write(self, size: int) -> bool:
        """Return whether to try to write `size` bytes. If not, count them as dropped."""
        if self._is_stopped:
            return False
        if not self._leaves_room(size):
            self._dropped += size
            return False
        if self._is_shortened and not self._said_shortened:
            self._said_shortened = self._say(_SHORTENED)
        if self._dropped and not self._say_dropped():
            self._dropped += size
            return False
        return True

    def _append(self, piece: bytes | memoryview) -> int:
        """Write `piece` at the end, and return how many of its bytes were written."""
        rest = memoryview(piece)
        while rest:
            try:
                written = os.pwrite(self._fd, rest, self._size)
            except OSError as error:
                if error.errno in (ENOSPC, EDQUOT) and self._free_half():
                    continue
                self._why_dropped = error.strerror or str(error)
                break
            rest = rest[written:]
            self._size += written
            self._is_dirty = True
        return len(piece) - len(rest)

    def _say_dropped(self) -> bool:
        count, self._dropped = self._dropped, 0
        if self._say(f"{count} bytes of output were dropped: {self._why_dropped}"):
            return True
        self._dropped = count
        return False

    def _say(self, sentence: str) -> bool:
        start = "\n" if self.is_mid_line else ""
        line = f"{start}[gpulease: {sentence}]\n".encode()
        size = self._size
        if self._append(line) == len(line):
            return True
        # Remove an incomplete message.
        os.ftruncate(self._fd, size)
        self._size = size
        return False

    def _leaves_room(self, size: int) -> bool:
        """Return whether the disk has room for `size` more bytes; remove the oldest part if not.

        A short log may grow even so. A long log that cannot be shortened may not.
        """
        self._unchecked += size
        if self._unchecked >= _CHECK_EVERY:
            self._unchecked, self._disk_is_full = 0, False
            while self._is_long and _free_space(self._fd) < self._keep_free + size:
                if not self._free_half():
                    self._why_dropped, self._disk_is_full = os.strerror(ENOSPC), True
                    break
        return not self._disk_is_full

    @property
    def _is_long(self) -> bool:
        return self._size - self._freed >= 2 * LEAST_KEPT

    def _free_half(self) -> bool:
        """Remove the older half, unless the log is short or the file system cannot do it."""
        if not self._is_long or self._free_until((self._size + self._freed) // 2) is not None:
            return False
        self._is_shortened = True
        return True

    def _free_over_limit(self) -> None:
        if self._free_until(self._size - self._limit) in (EOPNOTSUPP, ENOSYS):
            self._say("the log is full, and this file system cannot free its oldest part")
            self._is_stopped = True

    def _free_until(self, offset: int) -> int | None:
        """Free the blocks before `offset`, and return the errno of a failure."""
        end = offset // _BLOCK * _BLOCK
        try:
            punch_hole(self._fd, self._freed, end - self._freed)
        except OSError as error:
            return error.errno
        self._freed = end
        return None


def _free_space(fd: int) -> int:
    """Return how many bytes a user may still write to the file system of an open file."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize


def shorten_log(directory: int, name: str, keep: int) -> None:
    """Free all but the last `keep` bytes of a log, which its shim may be writing at this moment.

    `directory` is the job's directory, open. A file that is not a regular file of our own is not
    changed.

    Raises:
        OSError: the log does not exist, or the file system cannot free a part of a file.
    """
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        found = os.fstat(fd)
        end = (found.st_size - max(keep, LEAST_KEPT)) // _BLOCK * _BLOCK
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and end > 0:
            punch_hole(fd, 0, end)
    finally:
        os.close(fd)


_PIECE = 256 << 10
_BUFFER = memoryview(bytearray(_PIECE))
"""The piece that was read last. All streams share it, since they take turns."""
_REPLAY = 64 << 10
"""Bytes of past output that a client gets when it connects."""
_TERMINAL_READS = 16
"""Reads that make one piece: a terminal returns at most one page for each."""
_LAST_DRAIN = 4 << 20
"""Bytes read at the end at most: a process outside the worker may hold the pipe and write on."""


class OutputStream:
    """One output stream of the worker, passed on to its log and to the clients.

    `fd` is None for a stream that the worker does not have; then there is only the log.
    """

    def __init__(
        self,
        loop: EventLoop,
        clients: ShimClients,
        kind: FrameKind,
        fd: int | None,
        log: JobLog,
        is_terminal: bool = False,
    ) -> None:
        self._kind = kind
        self._log = log
        self._loop = loop
        self._fd = fd
        self._clients = clients
        self._is_terminal = is_terminal

    def read_on(self, on: bool) -> None:
        """Read what the worker writes, or stop reading, so that a full pipe blocks the worker."""
        if self._fd is not None:
            self._loop.on_readable(self._fd, self._read if on else None)

    def insert(self, text: str) -> None:
        """Add a line of gpulease's to log and output, on a line by itself as far as possible."""
        self._read()  # what the worker wrote earlier comes first
        end = "\r\n" if self._is_terminal else "\n"
        begin = end if self._log.is_mid_line else ""
        self._pass_on(f"{begin}{text}{end}".encode(errors="replace"))

    def log_line(self, text: str) -> None:
        """Add a line of gpulease's to the log only."""
        begin = "\n" if self._log.is_mid_line else ""
        self._log.write(f"{begin}[gpulease: {text}]\n".encode(errors="replace"))

    def replay(self, client: ShimClient) -> None:
        """Send the end of the log to a client that has just connected."""
        if last := self._log.tail(_REPLAY):
            client.send(frame(self._kind, last))

    def finish(self) -> None:
        """Read what is left in the pipe, then close the pipe and finish the log."""
        left = _LAST_DRAIN
        while left > 0 and (size := self._read()):
            left -= size
        self._close()
        self._log.finish()

    def sync(self) -> None:
        """Wait until the log is on disk."""
        self._log.sync()

    def _read(self) -> int:
        """Pass one piece on, and return its size: 0 if there is nothing now, or nothing more."""
        piece = self._next_piece()
        self._pass_on(piece)
        return len(piece)

    def _pass_on(self, piece: bytes | memoryview) -> None:
        if piece:
            self._log.write(piece)
            self._clients.show(self._kind, piece)

    def _next_piece(self) -> memoryview:
        size = 0
        try:
            for _ in range(_TERMINAL_READS if self._is_terminal else 1):
                if self._fd is None or size == _PIECE:
                    break
                read = os.readv(self._fd, [_BUFFER[size:]])
                if not read:
                    self._close()
                size += read
        except BlockingIOError:
            pass
        except OSError:
            self._close()  # a terminal that was hung up
        return _BUFFER[:size]

    def _close(self) -> None:
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None


_INPUT_BUFFER = 256 << 10
"""Bytes of input that wait for the worker before no more is read from the client."""


class InputStream:
    """The worker's standard input, if the shim has the other end of it.

    A terminal stays open when the input ends: `end_of_input` returns what to type there, given
    whether the last line is incomplete. A pipe, where `end_of_input` is None, is closed.
    """

    def __init__(
        self,
        loop: EventLoop,
        fd: int | None,
        end_of_input: Callable[[bool], bytes] | None = None,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._end_of_input = end_of_input
        self._queue = WriteBuffer()
        self._is_mid_line = False
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        """Whether to read more input from the client."""
        return self._queue.size < _INPUT_BUFFER

    def feed(self, piece: bytes) -> None:
        """Pass `piece` on as soon as the worker reads."""
        if self._fd is None or self._has_ended or not piece:
            return
        self._queue.add(piece)
        self._is_mid_line = piece[-1:] not in (b"\n", b"\r")
        self._write()

    def end(self) -> None:
        """Let the worker see the end of its input after what was fed so far."""
        if self._end_of_input is not None:
            self.feed(self._end_of_input(self._is_mid_line))
            self._is_mid_line = False
            return
        self._has_ended = True
        self._write()

    def close(self) -> None:
        """Close the worker's input now."""
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None
        self._queue.clear()

    def _write(self) -> None:
        fd = self._fd
        if fd is None:
            return
        try:
            self._queue.write(lambda pieces: os.writev(fd, pieces))
        except BlockingIOError:
            self._loop.on_writable(fd, self._write)
            return
        except OSError:
            self.close()  # the worker has closed its end
            return
        self._loop.on_writable(fd, None)
        if self._has_ended:
            self.close()
