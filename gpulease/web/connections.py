"""Connections of browsers: each has to send the head of its request soon, and a small one.

uvicorn waits for it without limit. Those who open connections and send nothing would keep all
others out, since `limit_concurrency` counts them.
"""

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LARGEST_HEAD = 64 * 1024
"""Bytes of a request's line and headers."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection, which is closed if the head of a request is late or too large."""

    head_within_s: ClassVar[float] = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its deadline."""
        super().connection_made(transport)
        self._unparsed = 0
        """Bytes received of an incomplete head."""
        self._deadline: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. No request has a body: what follows a head begins the next."""
        if self._deadline is None:
            self._await_head()
        self._unparsed += len(data)
        super().data_received(data)
        if self._deadline is not None and self._unparsed > _LARGEST_HEAD:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Serve a request with a complete head."""
        self._end_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._unparsed = 0
        self._deadline = self.loop.call_later(self.head_within_s, self.transport.abort)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
