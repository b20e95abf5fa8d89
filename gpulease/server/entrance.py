"""The listening socket: who has as many connections as one user may is told so, at little cost.

A connection that is let in costs a hundred times what one costs that is turned away here, and
others stand in the same line before the door.
"""

import contextlib
import socket
import struct

import msgspec

from gpulease.errors import TooMany
from gpulease.server.peer import PeerProtocol
from gpulease.wire import ErrorBody, ErrorReply

BACKLOG = 4096
"""Who may stand before the door; the kernel's usual most. When it is full, chance alone decides who
gets a place, and whoever tries most often is luckiest."""
LET_IN_AT_ONCE = 32
"""Between two looks at what else there is to do."""
_TURNED_AWAY_AT_ONCE = 256
_UCRED = struct.Struct("iII")


class Entrance(socket.socket):
    """A listening Unix socket whose accept() yields those alone who may come in."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """Listen; what asyncio takes for the backlog is how many it lets in at once."""
        del backlog
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection.

        Raises:
            BlockingIOError: there is none now.
        """
        for _ in range(_TURNED_AWAY_AT_ONCE):
            link, address = super().accept()
            if PeerProtocol.has_room_for(_uid_of(link)):
                return link, address
            with link, contextlib.suppress(OSError):
                link.send(_turned_away(), socket.MSG_DONTWAIT)
        raise BlockingIOError


def _uid_of(link: socket.socket) -> int:
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(packed)[1])


def _turned_away() -> bytes:
    most = PeerProtocol.most_connections
    error = TooMany(
        f"cannot reach the daemon: you have {most} connections open, the most for one user",
        "ask again when some of your commands have ended; jobs go on meanwhile",
    )
    body = msgspec.json.encode(ErrorReply(ErrorBody(error.code, error.message, error.hint)))
    head = (
        f"HTTP/1.1 {error.http_status} Too Many Requests\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
