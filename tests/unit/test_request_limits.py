"""Requests of one user take turns, and none is lost while it waits."""

import asyncio
from types import SimpleNamespace
from typing import Any

from gpulease.server.auth import Caller
from gpulease.server.messages import Message, Receive, Response, Scope, Send
from gpulease.server.request_limits import RequestLimits
from gpulease.server.router import error_response

MANY = 64
"""More requests than one user may have answered at once."""


class Slow:
    """An application whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self.go.wait()
        await Response(status=204)(receive, send)


async def status_of(app: RequestLimits) -> int:
    """Return the status of a request without a body, the event of which nobody has read yet."""
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    state: dict[str, Any] = {"caller": Caller(1, 1001, 1001), "transport": transport}
    unread: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"headers": [(b"content-length", b"0")], "state": state}, receive, send)
    return int(sent[0]["status"]) if sent else 0


def test_a_request_without_a_body_is_answered_after_it_waited() -> None:
    async def scenario() -> list[int]:
        slow = Slow()
        app = RequestLimits(slow, error_response)
        asked = [asyncio.ensure_future(status_of(app)) for _ in range(MANY)]
        for _ in range(10):
            await asyncio.sleep(0)
        slow.go.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(scenario()) == [204] * MANY
