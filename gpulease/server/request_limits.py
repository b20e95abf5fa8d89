"""Limits for each request (size and time) and for each user (requests, bodies, streams at once).

A request over the limit of its user waits for a slot, and so does a large body. A stream over the
limit is refused, since it may never end. A body must arrive in time and an answer must be taken in
time, so that neither stays in memory for a client that has stopped.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from gpulease.errors import GpuleaseError, TooLarge, TooMany, TooSlow
from gpulease.server.auth import caller_in
from gpulease.server.messages import (
    AsgiApp,
    Message,
    Receive,
    Response,
    Scope,
    Send,
    until_disconnected,
)
from gpulease.units import format_size
from gpulease.wire.requests import LARGEST_REQUEST

_REQUESTS_AT_ONCE = 4
"""Of one user: enough to keep the disk busy, and another user waits for at most four."""
_LARGE_BODIES_AT_ONCE = 8
"""Of one user, in memory."""


@dataclass(slots=True, weakref_slot=True)
class _UserLimits:
    requests: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_REQUESTS_AT_ONCE)
    )
    expensive: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    bodies: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_LARGE_BODIES_AT_ONCE)
    )
    streams: int = 0


class RequestSlot:
    """What one request takes of the limits of its user, until `release`."""

    def __init__(self, user: _UserLimits) -> None:
        self._user = user
        self._held: list[asyncio.Semaphore] = []
        self.is_stream = False
        """Whether the answer is a stream."""
        self._is_large = False

    async def for_large_body(self) -> None:
        """Wait until another large body of this user may be read."""
        await self._take(self._user.bodies)
        self._is_large = True

    @property
    def must_wait(self) -> bool:
        """Whether `for_answer` would wait."""
        user = self._user
        return user.requests.locked() or (self._is_large and user.expensive.locked())

    async def for_answer(self) -> None:
        """Wait until another request of this user may be answered."""
        if self._is_large:
            # It keeps the disk busy as long as many small requests.
            await self.for_expensive()
        await self._take(self._user.requests)

    async def for_expensive(self) -> None:
        """Wait until no other expensive request of this user is being answered."""
        await self._take(self._user.expensive)

    async def _take(self, semaphore: asyncio.Semaphore) -> None:
        await semaphore.acquire()
        self._held.append(semaphore)

    @property
    def streams(self) -> int:
        """How many streams the user has open."""
        return self._user.streams

    def become_stream(self, most: int | None) -> None:
        """Free the slot for other requests of this user, and continue as a stream.

        Raises:
            TooMany: the user has `most` streams already.
        """
        if most is not None and self._user.streams >= most:
            raise TooMany(
                f"cannot follow another job: you have {most} streams open, the most for one user",
                "end a gpulease logs -f or a waiting gpulease run first; jobs continue without "
                "them, and gpulease list shows them",
            )
        self._user.streams += 1
        self.is_stream = True
        self._free()

    def release(self) -> None:
        """Give back all that the request has taken."""
        if self.is_stream:
            self._user.streams -= 1
            self.is_stream = False
        self._free()

    def _free(self) -> None:
        for semaphore in self._held:
            semaphore.release()
        self._held = []


def slot_in(scope: Scope) -> RequestSlot:
    """Return the slot of a request, which `RequestLimits` has put into the ASGI scope."""
    slot = scope["state"]["slot"]
    assert isinstance(slot, RequestSlot)
    return slot


BODY_WITHIN_S = 30.0
"""For a whole body, without the wait for a slot; on a Unix socket it takes milliseconds."""
_SEND_WITHIN_S = 30.0
"""For each piece of an answer; also the longest that the client waits."""
_LARGE_BODY = 64 * 1024
_PIECE = 64 * 1024
_MOST_DISCARDED = 64 * 1024 * 1024
_DISCARD_WITHIN_S = 1.0

Refuse = Callable[[GpuleaseError], Response]


class _Disconnected(Exception):
    """The client has closed the connection."""


class RequestLimits:
    """The application behind the limits."""

    def __init__(self, app: AsgiApp, refusal: Refuse) -> None:
        """`refusal` makes the answer for an error."""
        self._app = app
        self._refusal = refusal
        self._users: WeakValueDictionary[int, _UserLimits] = WeakValueDictionary()
        """The users who have requests now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        uid = caller_in(scope).uid
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _UserLimits()
        slot = RequestSlot(user)
        scope["state"]["slot"] = slot
        try:
            await self._serve(scope, receive, _Outgoing(send, slot, scope["state"]["transport"]))
        finally:
            slot.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        slot = slot_in(scope)
        try:
            scope["state"]["body"] = await _whole(scope, receive, slot)
            if slot.must_wait:
                await _unless_disconnected(slot.for_answer(), receive)
            else:
                await slot.for_answer()
        except _Disconnected:
            return
        except GpuleaseError as error:
            await self._refuse(error, receive, send)
            return
        await self._app(scope, receive, send)

    async def _refuse(self, error: GpuleaseError, receive: Receive, send: Send) -> None:
        response = self._refusal(error)
        response.headers.append((b"connection", b"close"))
        if not isinstance(error, TooLarge):
            await response(receive, send)
            return

        async def send_unfinished(message: Message) -> None:
            await send({**message, "more_body": True})

        # The client has the whole answer now, and the connection closes after the last message.
        await response(receive, send_unfinished)
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def _whole(scope: Scope, receive: Receive, slot: RequestSlot) -> bytes:
    """Return the body of a request.

    Raises:
        TooLarge: it exceeds the limit.
        TooSlow: it did not arrive in time.
    """
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    # The length of a body in chunks, or behind a header without a number, is known at its end.
    if b"transfer-encoding" not in headers and length.isdigit():
        if int(length) == 0:
            return b""
        if int(length) > LARGEST_REQUEST:
            raise _too_large()
    body = bytearray()
    if not await _read(body, receive, beyond=_LARGE_BODY):
        # What is not read yet stays in the memory of the client.
        await slot.for_large_body()
        await _read(body, receive, beyond=LARGEST_REQUEST)
    if len(body) > LARGEST_REQUEST:
        raise _too_large()
    return bytes(body)


async def _read(body: bytearray, receive: Receive, beyond: int) -> bool:
    """Read to the end or until there are more than `beyond` bytes; return whether it ended."""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            while len(body) <= beyond:
                message = await receive()
                if message["type"] != "http.request":
                    raise _Disconnected
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        raise TooSlow(
            f"cannot take this request: its body did not arrive within {BODY_WITHIN_S:g} seconds",
            "give the command again; it may have been stopped with Ctrl-Z while it asked",
        ) from None
    return False


async def _unless_disconnected(slot: Awaitable[None], receive: Receive) -> None:
    """Wait for a slot as long as the client does."""
    waiting = asyncio.ensure_future(slot)
    await asyncio.sleep(0)
    if waiting.done():
        return
    # The body of a request without one is still to be received.
    leaving = asyncio.ensure_future(until_disconnected(receive))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise _Disconnected
    finally:
        waiting.cancel()
        leaving.cancel()


class _Outgoing:
    """Sends an answer in pieces, and disconnects a client that takes none, except of a stream."""

    def __init__(self, send: Send, slot: RequestSlot, transport: asyncio.WriteTransport) -> None:
        self._send = send
        self._slot = slot
        self._transport = transport

    async def __call__(self, message: Message) -> None:
        body, begin = message.get("body", b""), 0
        while len(body) - begin > _PIECE:
            piece = body[begin : begin + _PIECE]
            await self._pass({**message, "body": piece, "more_body": True})
            begin += _PIECE
        await self._pass({**message, "body": body[begin:]} if begin else message)

    async def _pass(self, message: Message) -> None:
        if self._slot.is_stream or not self._transport.get_write_buffer_size():
            await self._send(message)
            return
        try:
            async with asyncio.timeout(_SEND_WITHIN_S):
                await self._send(message)
        except TimeoutError:
            self._transport.abort()


async def _discard(receive: Receive) -> None:
    """Let a client finish writing, up to a limit: it may read the answer only afterwards."""
    discarded = 0
    try:
        async with asyncio.timeout(_DISCARD_WITHIN_S):
            while discarded < _MOST_DISCARDED:
                message = await receive()
                discarded += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large() -> TooLarge:
    return TooLarge(
        f"cannot take this request: it is larger than {format_size(LARGEST_REQUEST)}",
        "unset large environment variables, or put their contents in a file",
    )
