"""A pipe of our own, through which bytes go from one descriptor to another without a copy.

splice(2) moves references to pages. What came out of a file that is changed meanwhile may show the
change, as it would to whoever reads that file themselves.
Standard library only: the shim imports this, and the command's every-day path.
"""

import fcntl
import os
from collections.abc import Callable
from errno import EMFILE

ROOM = 1 << 20
"""Bytes that a wide pipe holds: as much as anyone may have in one (pipe(7))."""
_LESS_ROOM = 256 << 10
_LEAST_ROOM = 64 << 10
"""Bytes; with less than that, copying is no slower."""

Mover = Callable[[int, int, int], int]
"""Carries at most so many bytes from a descriptor to another without blocking: splice or tee."""


class Conduit:
    """What has been taken in and not been passed on yet; the pipe is made at its first use."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes that are in it."""
        self._ends: tuple[int, int] | None = None

    @property
    def exit(self) -> int:
        """The descriptor off which the held bytes are read."""
        return self._open()[0]

    def fill(self, source: int, most: int, mover: Mover | None = None) -> int:
        """Take in at most `most` bytes, and return how many; 0 at the end of `source`.

        Raises:
            BlockingIOError: nothing is there now, or there is no room for it.
            OSError: no pipe could be had, or `source` has to be read.
        """
        size = (mover or _splice)(source, self._open()[1], most)
        self.held += size
        return size

    def pass_on(self, target: int, offset: int | None = None) -> int:
        """Move held bytes on to `target`, or to this place in it, and return how many.

        Raises:
            BlockingIOError: `target` takes nothing now.
            OSError: it takes nothing any more, or has to be written (EINVAL).
        """
        flags = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
        size = os.splice(self.exit, target, self.held, offset_dst=offset, flags=flags)
        self.held -= size
        return size

    def read(self) -> bytes:
        """Take out all that is held."""
        pieces = []
        while self.held:
            piece = os.read(self.exit, self.held)
            self.held -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def clear(self) -> None:
        """Forget what is held, and give the pipe back."""
        self.held = 0
        if self._ends is not None:
            for end in self._ends:
                os.close(end)
            self._ends = None

    def _open(self) -> tuple[int, int]:
        if self._ends is None:
            self._ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            if widen(self._ends[1]) < _LEAST_ROOM:
                self.clear()
                raise OSError(EMFILE, "no more pages for pipes")
        return self._ends


def widen(pipe: int) -> int:
    """Let a pipe hold much more, so that it has to be seen to less often; return what it holds.

    To be done for what streams only: all pipes of a user may have 64 MiB together before the kernel
    makes new ones small (pipe-user-pages-soft in pipe(7)).
    """
    for room in (ROOM, _LESS_ROOM):
        try:
            return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, room)
        except OSError:
            pass
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def _splice(source: int, target: int, most: int) -> int:
    return os.splice(source, target, most, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE)
