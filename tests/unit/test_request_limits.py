"""Requests of one user take turns, and none is lost while it waits."""

import asyncio
from types import SimpleNamespace
from typing import Any

from gpulease.server.auth import Caller
from gpulease.server.messages import Message, Receive, Response, Scope, Send
from gpulease.server.request_limits import RequestLimits
from gpulease.server.router import error_response
from gpulease.wire.requests import LARGEST_REQUEST

MANY = 64
"""More requests than one user may have answered at once."""


class Slow:
    """An application whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self.go.wait()
        await Response(status=204)(receive, send)


def new_state() -> dict[str, Any]:
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    return {"caller": Caller(1, 1001, 1001), "transport": transport}


async def status_of(app: RequestLimits) -> int:
    """Return the status of a request without a body, the event of which nobody has read yet."""
    unread: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"headers": [(b"content-length", b"0")], "state": new_state()}, receive, send)
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


def test_a_body_declared_too_large_is_refused_before_it_comes() -> None:
    sent: list[Message] = []
    sent_before: list[int] = []

    async def receive() -> Message:
        sent_before.append(len(sent))
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    length = b"%d" % (LARGEST_REQUEST + 1)
    scope = {"headers": [(b"content-length", length)], "state": new_state()}
    asyncio.run(RequestLimits(Slow(), error_response)(scope, receive, send))
    start, body, end = sent
    assert start["status"] == 413
    assert b"too_large" in body["body"]
    assert sent_before == [2]
    assert not end.get("more_body")
