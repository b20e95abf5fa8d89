"""uvicorn on a Unix socket, with peer credentials and with limits for each connection.

All that depends on undocumented parts of uvicorn is in this module: pyproject.toml bounds the
version.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gpulease.errors import BadValue, GpuleaseError, TooLarge
from gpulease.server.auth import caller_of
from gpulease.server.listener import HEAD_WITHIN_S, Acceptor, ConnectionCounts, raw_response
from gpulease.server.messages import AsgiApp
from gpulease.units import format_size

_LARGEST_HEAD = 64 * 1024
"""Bytes of a request's line and headers."""
_CLOSE_WITHIN_S = 2
"""For open connections when the server ends."""

_MALFORMED = BadValue(
    "cannot read this request: it is not valid HTTP/1.1",
    "use curl --unix-socket, or an HTTP library that connects to Unix sockets",
)
_PIPELINED = BadValue(
    "cannot take this request: the one before it on this connection has no answer yet",
    "read the answer first, or open another connection",
)


class Pipelined(Exception):
    """A second request came before the first was answered; httptools makes it a 400."""


class HeadTooLarge(Exception):
    """A request's line and headers exceed the limit; httptools makes it a 400."""


class _Joining:
    """A transport that writes the head of an answer together with what follows it at once.

    uvicorn writes them one by one: that is two system calls here, and the client wakes twice.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            self._transport.write(self._held + data)
            self._held = b""
        else:
            self._held = data
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Puts the caller into the state of each request, and limits its head.

    No handler knows the caller before the head is complete, so its size and time are limited here.
    """

    counts: ClassVar[ConnectionCounts] = ConnectionCounts()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joining(transport, self.loop))  # type: ignore[arg-type]
        caller = caller_of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "caller": caller, "transport": transport}
        self._uid = caller.uid
        self._unparsed: int | None = 0
        """Bytes received of an incomplete head; None after its end, until the next begins."""
        self._head_size = 0
        """Bytes parsed of the head, which may have arrived in one piece."""
        self._is_pipelined = False
        self._deadline = self.loop.call_later(HEAD_WITHIN_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self.counts.remove(self._uid)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._unparsed is None or self.transport.is_closing():
            return
        self._unparsed += len(data)
        if self._unparsed > _LARGEST_HEAD:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        del msg  # it says the same of everything that httptools refuses
        if self._head_size > _LARGEST_HEAD:
            self._refuse_head()
        elif self._is_pipelined:
            self._refuse(_PIPELINED, "Bad Request")
        else:
            self._refuse(_MALFORMED, "Bad Request")

    def _refuse_head(self) -> None:
        error = TooLarge(
            "cannot take this request: its line and headers are larger than "
            f"{format_size(_LARGEST_HEAD)}",
            "send large values in the body",
        )
        self._refuse(error, "Content Too Large")

    def _refuse(self, error: GpuleaseError, phrase: str) -> None:
        self.transport.write(raw_response(error, phrase))
        self.transport.close()

    def on_message_begin(self) -> None:
        # No client of ours pipelines, and a connection could queue requests without limit.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._is_pipelined = True
            raise Pipelined
        self._unparsed = self._head_size = 0
        self._deadline.cancel()
        self._deadline = self.loop.call_later(HEAD_WITHIN_S, self.transport.abort)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _LARGEST_HEAD:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._unparsed = None
        self._deadline.cancel()
        super().on_headers_complete()


class HttpServer(uvicorn.Server):
    """Serves an application until `leave` is set, without uvicorn's signal handlers and ticks."""

    def __init__(self, app: AsgiApp, leave: asyncio.Event) -> None:
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=_CLOSE_WITHIN_S,
        )
        super().__init__(config)
        self._leave = leave
        self._acceptor: Acceptor | None = None

    @property
    def open_connections(self) -> int:
        """The number of connections that are set up."""
        return len(self.server_state.connections)

    async def main_loop(self) -> None:
        await self._leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listening in sockets or ():
            await self.move(listening)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    async def move(self, listening: socket.socket) -> None:
        """Accept connections on `listening` from now on; those that are open stay so."""
        former = self._acceptor
        self._acceptor = Acceptor(listening, self._protocol, HttpProtocol.counts)
        if former is not None:
            former.close()

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, self.lifespan.state)
