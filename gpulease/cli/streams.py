"""The standard streams of `run`: bytes out with a bound on what waits, bytes in while wanted.

Nothing here blocks: a pipe is written only where poll(2) says that there is room, and no stream is
made non-blocking, since that would be so for the whole terminal, shell and all.
"""

import errno
import os
import stat

PIECE = 64 * 1024
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
        self._waiting = bytearray()
        self._at_once = _takes_all(handle)

    def put(self, piece: bytes) -> None:
        """Keep `piece` for writing; for a broken stream it is dropped."""
        if not self.broken:
            self._waiting += piece

    @property
    def wants_room(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should be fetched."""
        return len(self._waiting) >= PIECE

    def write(self) -> None:
        """Write what there is room for; call when poll says so."""
        size = len(self._waiting) if self._at_once else _ROOM
        try:
            written = os.write(self.handle, bytes(self._waiting[:size]))
        except BlockingIOError:
            return
        except OSError as error:
            # EPIPE from a reader that left, EBADF from `>&-`, ENOSPC, EIO: none of them mends.
            self.broken = True
            unwanted = error.errno in (errno.EPIPE, errno.EBADF)
            self.trouble = None if unwanted else error.strerror
            self._waiting.clear()
            return
        del self._waiting[:written]


def _takes_all(handle: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError:
        return False


class Inlet:
    """Our own standard input."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.ended = False
        self._is_terminal = os.isatty(handle)

    @property
    def is_ours(self) -> bool:
        """Whether we may read: a terminal belongs to the job in its foreground."""
        if not self._is_terminal:
            return True
        try:
            return os.tcgetpgrp(self.handle) == os.getpgrp()
        except OSError:
            return False

    def read(self) -> bytes:
        """Return what is there; call when poll says so. `ended` is set at the end of it."""
        try:
            piece = os.read(self.handle, PIECE)
        except BlockingIOError:
            return b""
        except OSError as error:
            # EIO from a terminal means that we went into the background just now, or that the
            # terminal is gone; the latter comes with a SIGHUP of its own.
            self.ended = not (self._is_terminal and error.errno == errno.EIO)
            return b""
        self.ended = not piece
        return piece
