"""Who is at the other end of a connection: what the kernel says, never what they write."""

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any

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


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with the caller in the state of each request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {
            **self.app_state,
            "caller": caller_of(transport.get_extra_info("socket")),
        }


def caller_in(scope: dict[str, Any]) -> Caller:
    """Return the caller of a request, as `PeerProtocol` left it in the ASGI scope."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller
