"""Every request within bounds of size, time and turn, before any handler sees it.

A body is read whole, in time, and then handed on; an answer has to be taken in time, in pieces, so
that neither of the two is kept in memory for somebody who has stopped.

How much of the daemon one user may have at once, so that others are served beside them.

All is counted by who calls. A request past the bound waits for its turn, as does a large body; a
stream past the bound is refused, since it might never end. What waits costs little.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease.errors import GpuleaseError, TooLarge, TooMany, TooSlow
from gpulease.server.auth import caller_in
from gpulease.units import format_size
from gpulease.wire.requests import LARGEST_REQUEST

_REQUESTS_AT_ONCE = 4
"""Of one user, being answered: enough to keep the disk busy, and others are next but four."""
_LARGE_BODIES_AT_ONCE = 8
"""Of one user, in memory."""


@dataclass(slots=True, weakref_slot=True)
class _User:
    answered: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_REQUESTS_AT_ONCE)
    )
    much: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    bodies: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_LARGE_BODIES_AT_ONCE)
    )
    streams: int = 0


class Slot:
    """One request's place among those of its user, kept until it is left."""

    def __init__(self, user: _User) -> None:
        self._user = user
        self._held: list[asyncio.Semaphore] = []
        self._streams = False
        self._is_large = False

    async def for_large_body(self) -> None:
        """Wait until one more large body of this user may be read."""
        await self._take(self._user.bodies)
        self._is_large = True

    async def for_answer(self) -> None:
        """Wait until one more request of this user may be answered."""
        if self._is_large:
            # It takes the disk as long as many small ones.
            await self.for_much()
        await self._take(self._user.answered)

    async def for_much(self) -> None:
        """Wait until this user has nothing else that takes long."""
        await self._take(self._user.much)

    async def _take(self, semaphore: asyncio.Semaphore) -> None:
        await semaphore.acquire()
        self._held.append(semaphore)

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream by now."""
        return self._streams

    def go_on_as_stream(self, most: int | None) -> None:
        """Let others of this user have their turn while the answer goes on, maybe for ever.

        Raises:
            TooMany: the user has `most` streams already.
        """
        if most is not None and self._user.streams >= most:
            raise TooMany(
                f"cannot follow this too: you have {most} streams open, the most for one user",
                "jobs go on without being followed, and gpulease list shows them; "
                "end a gpulease logs -f or a waiting gpulease run to follow another",
            )
        self._user.streams += 1
        self._streams = True
        self._let_go()

    def leave(self) -> None:
        """Give back all that was taken."""
        if self._streams:
            self._user.streams -= 1
            self._streams = False
        self._let_go()

    def _let_go(self) -> None:
        for semaphore in self._held:
            semaphore.release()
        self._held = []


class UserSlots:
    """The users who are here, each with what they have at once."""

    def __init__(self) -> None:
        self._users: WeakValueDictionary[int, _User] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[Slot]:
        """Hand out the turn of one request."""
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User()
        turn = Slot(user)
        try:
            yield turn
        finally:
            turn.leave()


def turn_in(scope: dict[str, Any]) -> Slot:
    """Return the turn of a request, as it was left in the ASGI scope."""
    turn = scope["state"]["turn"]
    assert isinstance(turn, Slot)
    return turn


BODY_WITHIN_S = 30.0
"""For the whole of a body, not counting the wait for its turn; on a Unix socket it takes none."""
_ANSWER_TAKEN_WITHIN_S = 30.0
"""For each piece of an answer; what a command waits for at most, too."""
_LARGE_BODY = 64 * 1024
_PIECE = 64 * 1024
_MOST_READ_IN_VAIN = 64 * 1024 * 1024

Refuse = Callable[[object, Exception], Awaitable[ASGIApp]]


class _Gone(Exception):
    """The caller has hung up."""


class RequestLimits:
    """The application, as much of it as one user may have at once."""

    def __init__(self, app: ASGIApp, refusal: Refuse) -> None:
        """`refusal` makes the answer that says an error."""
        self._app = app
        self._refusal = refusal
        self._turns = UserSlots()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with self._turns.of(caller_in(dict(scope)).uid) as turn:
            scope["state"]["turn"] = turn
            outgoing = _Outgoing(send, turn, scope["state"]["abort"])
            try:
                body = await _whole(scope, receive, turn)
                await _unless_gone(turn.for_answer(), receive)
            except _Gone:
                return
            except GpuleaseError as error:
                if isinstance(error, TooLarge):
                    await _read_to_the_end(receive)
                response = await self._refusal(None, error)
                response.headers["connection"] = "close"  # type: ignore[attr-defined]
                await response(scope, receive, outgoing)
                return
            await self._app(scope, _once(body, receive), outgoing)


async def _whole(scope: Scope, receive: Receive, turn: Slot) -> bytes:
    """Return the body of a request.

    Raises:
        TooLarge: it is larger than anything that the kernel could execute.
        TooSlow: it did not come in time.
    """
    if _announced(scope) > LARGEST_REQUEST:
        raise _too_large()
    body = bytearray()
    if not await _read(body, receive, beyond=_LARGE_BODY):
        # What is not read stays with the caller: it costs the daemon nothing.
        await turn.for_large_body()
        await _read(body, receive, beyond=LARGEST_REQUEST)
    if len(body) > LARGEST_REQUEST:
        raise _too_large()
    return bytes(body)


async def _read(body: bytearray, receive: Receive, beyond: int) -> bool:
    """Read on to the end, or until there are more than `beyond` bytes; return whether it ended."""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            while len(body) <= beyond:
                message = await receive()
                if message["type"] != "http.request":
                    raise _Gone
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        raise TooSlow(
            f"cannot take this request: its body did not come within {BODY_WITHIN_S:g} seconds",
            "ask again; a command that was stopped (Ctrl-Z) while it asked has to ask anew",
        ) from None
    return False


async def _unless_gone(turn: Awaitable[None], receive: Receive) -> None:
    """Wait for a turn, for as long as the caller does."""
    waiting = asyncio.ensure_future(turn)
    await asyncio.sleep(0)
    if waiting.done():
        return
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise _Gone
    finally:
        waiting.cancel()
        leaving.cancel()


def _once(body: bytes, receive: Receive) -> Receive:
    """Return what gives the body, and after it what comes then: that the caller hangs up."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


class _Outgoing:
    """Sends an answer in pieces; who takes none of it for long is hung up on, but for a stream."""

    def __init__(self, send: Send, turn: Slot, abort: Callable[[], None]) -> None:
        self._send = send
        self._turn = turn
        self._abort = abort

    async def __call__(self, message: Message) -> None:
        body, begin = message.get("body", b""), 0
        while len(body) - begin > _PIECE:
            piece = body[begin : begin + _PIECE]
            await self._pass({**message, "body": piece, "more_body": True})
            begin += _PIECE
        await self._pass({**message, "body": body[begin:]} if begin else message)

    async def _pass(self, message: Message) -> None:
        if self._turn.streams:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(_ANSWER_TAKEN_WITHIN_S):
                await self._send(message)
        except TimeoutError:
            self._abort()


async def _read_to_the_end(receive: Receive) -> None:
    """Let a caller finish writing, within reason: only then do they read the answer."""
    taken = 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            while taken < _MOST_READ_IN_VAIN:
                message = await receive()
                taken += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _announced(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() else 0


def _too_large() -> TooLarge:
    return TooLarge(
        f"cannot take this request: it is larger than {format_size(LARGEST_REQUEST)}",
        "unset large environment variables, or put their contents in a file",
    )
