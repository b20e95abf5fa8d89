"""The standard streams of `run`: bytes out with a bound on what waits, bytes in while wanted.

Nothing here blocks, and no stream that we were given is made non-blocking, since that would be so
for everyone who shares it, shell and all. A pipe is opened once more, for ourselves, to be written
without blocking; where that may not be, only as much as poll(2) vouches for is written.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable

from gpulease.backlog import Backlog, Piece
from gpulease.cli.tty import is_ours
from gpulease.conduit import ROOM, Conduit

PIECE = 256 * 1024
"""Bytes read from stdin at once, and kept for a slow reader before more are refused."""
_ROOM = 4096
"""Bytes that a pipe takes without blocking where poll says that it is writable (PIPE_BUF)."""


class Outlet:
    """One of our own output streams, and what waits to be written there."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.broken = False
        """Nothing can be written there any more."""
        self.trouble: str | None = None
        """Why it broke, where that is not that nobody wants to read."""
        self.was_terminal = os.isatty(handle)
        """Whether it was one when we began: one that is gone does not say so."""
        self.mid_line = False
        """What was put last did not end its line."""
        self._waiting = Backlog()
        self._is_file = _is(handle, stat.S_ISREG)
        self._way = _reopened(handle) if _is(handle, stat.S_ISFIFO) else None
        self._conduit = Conduit()
        """What is to be written before what waits."""
        self._can_move = self._is_file or self._way is not None

    def move(self, source: int, most: int) -> int | None:
        """Move at most `most` bytes of a socket here, uncopied, and return how many.

        None: they have to be read, and put.
        """
        if self.broken or self.wants_room or not self._can_move:
            return None
        try:
            size = self._conduit.fill(source, most)
        except BlockingIOError:
            return 0
        except OSError:
            self._can_move = False
            return None
        self.write()
        return size or None

    def put(self, piece: bytes) -> None:
        """Keep `piece` for writing; for a broken stream it is dropped."""
        if not self.broken and piece:
            self._waiting.add(piece)
            self.mid_line = not piece.endswith(b"\n")
            if self._is_file:
                self.write()

    @property
    def wants_room(self) -> bool:
        """Whether something waits to be written."""
        return self._waiting.size + self._conduit.held > 0

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should be fetched."""
        return self._waiting.size + self._conduit.held >= PIECE

    def write(self) -> None:
        """Write what there is room for; call when poll says so."""
        try:
            self._empty_conduit()
            if self._waiting.size:
                self._waiting.write(self._write_some)
        except BlockingIOError:
            return
        except OSError as error:
            # EPIPE from a reader that left, EBADF from `>&-`, ENOSPC, EIO: none of them mends.
            self.broken = True
            unwanted = error.errno in (errno.EPIPE, errno.EBADF)
            self.trouble = None if unwanted else error.strerror
            self._waiting.clear()
            self._conduit.clear()

    def _empty_conduit(self) -> None:
        try:
            while self._conduit.held:
                self._conduit.pass_on(self._target)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Nothing can be spliced here, as to a file that is open for appending.
            self._can_move = False
            self._waiting.add(self._conduit.read())

    @property
    def _target(self) -> int:
        return self.handle if self._way is None else self._way

    def _write_some(self, pieces: list[Piece]) -> int:
        if self._is_file or self._way is not None:
            return os.writev(self._target, pieces)
        return os.write(self.handle, pieces[0][:_ROOM])


def _is(handle: int, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.fstat(handle).st_mode)
    except OSError:
        return False


def _reopened(handle: int) -> int | None:
    try:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None  # not even ours to write
        return os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # another user's, or without a reader by now


class Inlet:
    """Our own standard input."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.ended = False
        self.is_terminal = os.isatty(handle)
        self.conduit = Conduit()
        self._can_move = _is(handle, stat.S_ISREG) or _is(handle, stat.S_ISFIFO)

    def fill(self) -> int | None:
        """Take what is there into the conduit, which is empty; return how much it is.

        None: it has to be read. `ended` is set at the end of it.
        """
        if not self._can_move:
            return None
        try:
            size = self.conduit.fill(self.handle, ROOM)
        except BlockingIOError:
            return 0
        except OSError:
            self._can_move = False
            return None
        self.ended = not size
        return size

    @property
    def is_ours(self) -> bool:
        """Whether we may read: a terminal belongs to the job in its foreground."""
        return not self.is_terminal or is_ours(self.handle)

    def read(self) -> bytes:
        """Return what is there; call when poll says so. `ended` is set at the end of it."""
        try:
            piece = os.read(self.handle, PIECE)
        except BlockingIOError:
            return b""
        except OSError as error:
            # EIO from a terminal means that we went into the background just now, or that the
            # terminal is gone; the latter comes with a SIGHUP of its own.
            self.ended = not (self.is_terminal and error.errno == errno.EIO)
            return b""
        self.ended = not piece
        return piece
