"""What waits to go out on a socket that does not block: bytes in order, some of them in a conduit.

Standard library only: the shim imports this, and the command's every-day path.
"""

import socket

from gpulease.backlog import Backlog, Piece
from gpulease.conduit import Conduit


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
