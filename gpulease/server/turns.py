"""How much of the daemon one user may have at once, so that others are served beside them.

All is counted by who calls. A request past the bound waits for its turn, as does a large body; a
stream past the bound is refused, since it might never end. What waits costs little.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from gpulease.errors import TooMany

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


class Turn:
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


class Turns:
    """The users who are here, each with what they have at once."""

    def __init__(self) -> None:
        self._users: WeakValueDictionary[int, _User] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[Turn]:
        """Hand out the turn of one request."""
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User()
        turn = Turn(user)
        try:
            yield turn
        finally:
            turn.leave()


def turn_in(scope: dict[str, Any]) -> Turn:
    """Return the turn of a request, as it was left in the ASGI scope."""
    turn = scope["state"]["turn"]
    assert isinstance(turn, Turn)
    return turn
