"""Responses, as handlers make them: a thin layer over ASGI."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"
PLAIN_TEXT = "text/plain"


class Response:
    """A whole answer."""

    def __init__(
        self, content: bytes = b"", status: int = 200, media_type: str | None = None
    ) -> None:
        self.content = content
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []
        if media_type is not None:
            self.headers.append((b"content-type", media_type.encode()))

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Send it; after `send` has returned, the client may not have it yet."""
        del receive  # a complete answer need not watch the client
        if self.status != 204:
            self.headers.append((b"content-length", b"%d" % len(self.content)))
        await send(_start(self.status, self.headers))
        await send({"type": "http.response.body", "body": self.content})


def json_response(content: object, status: int = 200) -> Response:
    """Return a wire object as a response."""
    return Response(msgspec.json.encode(content), status, JSON)


class StreamingResponse(Response):
    """An answer in pieces, each of which is sent at once, until the client disconnects."""

    def __init__(self, pieces: AsyncIterator[bytes], status: int = 200, *, media_type: str) -> None:
        super().__init__(status=status, media_type=media_type)
        self._pieces = pieces

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Send all pieces."""
        serving = asyncio.current_task()
        assert serving is not None
        leaving = asyncio.ensure_future(until_disconnected(receive))
        leaving.add_done_callback(lambda it: it.cancelled() or serving.cancel())
        try:
            await send(_start(self.status, self.headers))
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if not leaving.done():
                raise  # the daemon stops
        finally:
            leaving.cancel()


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; what is left of its request is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
