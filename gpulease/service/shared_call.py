"""Calls that several callers share, since one result is good for all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Makes one call at a time. Callers that arrive during a call share the next one.

    So each caller gets the result of a call that began after its request.
    """

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._turn = asyncio.Lock()
        self._begun = 0
        """Number of calls that have begun."""
        self._latest: tuple[int, T] | None = None
        """The latest result, and the number of its call."""

    async def __call__(self) -> T:
        """Return the result of a call that begins after this one."""
        wanted = self._begun + 1
        async with self._turn:
            if self._latest is None or self._latest[0] < wanted:
                self._begun += 1
                number = self._begun
                self._latest = number, await self._call()
            return self._latest[1]
