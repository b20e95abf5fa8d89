"""What waits to go out on a socket that does not block: bytes in order, some of them in a conduit.

Standard library only: the shim imports this, and the command's every-day path.

Bytes that wait to be written, in the order in which they came, and copied as little as may be.

Standard library only: the shim imports this, and the command's every-day path.

A pipe of our own, through which bytes go from one descriptor to another without a copy.

splice(2) moves references to pages. What came out of a file that is changed meanwhile may show the
change, as it would to whoever reads that file themselves.
Standard library only: the shim imports this, and the command's every-day path.
"""

import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable
from errno import EMFILE
from itertools import islice

Piece = bytes | bytearray | memoryview

_SMALL = 4096
"""Bytes; what is smaller is put together, or a million single bytes would take 100 MB."""
_LARGE = 64 << 10
"""Bytes; what was put together from so much is left at that."""
_MOST_AT_ONCE = 64
"""Buffers in one call; the system's own limit is 1024."""


class Backlog:
    """A queue of bytes."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that wait."""
        self._pieces: deque[Piece] = deque()

    def add(self, piece: Piece) -> None:
        """Append `piece`; what may change afterwards, a view or a bytearray, is copied."""
        self.size += len(piece)
        if len(piece) >= _SMALL:
            self._pieces.append(bytes(piece))
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < _LARGE:
            last += piece
        elif piece:
            self._pieces.append(bytearray(piece))

    def write(self, writer: Callable[[list[Piece]], int]) -> None:
        """Hand the first of it to `writer`, which returns how many bytes it took."""
        self._drop(writer(list(islice(self._pieces, _MOST_AT_ONCE))))

    def clear(self) -> None:
        """Forget all of it."""
        self._pieces.clear()
        self.size = 0

    def _drop(self, size: int) -> None:
        self.size -= size
        while size and len(self._pieces[0]) <= size:
            size -= len(self._pieces.popleft())
        if size:
            self._pieces[0] = memoryview(self._pieces[0])[size:]


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


class Outgoing:
    """One direction of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._first = Backlog()
        self._conduit: Conduit | None = None
        self._then = Backlog()
        """What came after the conduit."""

    @property
    def size(self) -> int:
        """Bytes that wait."""
        held = self._conduit.held if self._conduit is not None else 0
        return self._first.size + held + self._then.size

    @property
    def pours(self) -> bool:
        """Whether a conduit is on its way, and no other can be taken."""
        return self._conduit is not None

    def add(self, piece: Piece) -> None:
        """Append `piece`; what may change afterwards is copied."""
        (self._first if self._conduit is None else self._then).add(piece)

    def pour(self, conduit: Conduit) -> None:
        """Append what `conduit` holds; it is ours until it is empty."""
        assert self._conduit is None
        self._conduit = conduit

    def write(self) -> None:
        """Send what the socket takes.

        Raises:
            BlockingIOError: it takes no more for now.
            OSError: it takes nothing any more.
        """
        while self.size:
            if self._first.size:
                self._first.write(self._sock.sendmsg)
            else:
                self._empty_conduit()

    def clear(self) -> None:
        """Forget all of it."""
        self._first.clear()
        self._then.clear()
        if self._conduit is not None:
            self._conduit.clear()
            self._conduit = None

    def _empty_conduit(self) -> None:
        conduit = self._conduit
        assert conduit is not None
        if conduit.held:
            conduit.pass_on(self._sock.fileno())
        if not conduit.held:
            self._conduit = None
            self._first, self._then = self._then, self._first
