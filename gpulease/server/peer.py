"""Who is at the other end of a connection: what the kernel says, never what they write."""

import asyncio
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that opened the connection: its ids at that moment (SO_PEERCRED, unix(7))."""

    pid: int
    uid: int
    gid: int


def caller_of(connection: socket.socket) -> Caller:
    """Ask the kernel who is at the other end of a connected Unix socket."""
    return Caller(
        *_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    )


_LARGEST_HEAD = 64 * 1024
"""Bytes of a request's line and headers."""
_HEAD_WITHIN_S = 10.0
_MOST_CONNECTIONS = 1000
"""Of one user at once; every `run` that waits holds one. Root has no such limit."""


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with the caller in each request's state, and with bounds.

    Until a request's headers are complete nobody has been identified to any handler, so what one
    user can make the daemon hold by then is bounded here.
    """

    _connections: ClassVar[Counter[int]] = Counter()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        caller = caller_of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "caller": caller}
        self._uid = caller.uid
        self._head_size: int | None = 0
        self._deadline = self.loop.call_later(_HEAD_WITHIN_S, self._waited_enough)
        self._connections[self._uid] += 1
        if self._uid != 0 and self._connections[self._uid] > _MOST_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._connections[self._uid] -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_size is None:
            return
        self._head_size += len(data)
        if self._head_size > _LARGEST_HEAD:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._head_size = 0
        self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEAD_WITHIN_S, self._waited_enough)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_size = None
        self._deadline.cancel()
        super().on_headers_complete()

    def _waited_enough(self) -> None:
        self.transport.abort()


def caller_in(scope: dict[str, Any]) -> Caller:
    """Return the caller of a request, as `PeerProtocol` left it in the ASGI scope."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller
