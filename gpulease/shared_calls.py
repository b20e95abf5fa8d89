"""Calls that several callers share, since one result is good for all of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """A call, and until when others may have its result."""

    result: asyncio.Task[Any]
    fresh_until: float
    has_begun: bool = False


class SharedCalls:
    """Shares calls by key, and makes at most `at_once` calls at a time."""

    def __init__(self, at_once: int = 1) -> None:
        self._turn = asyncio.Semaphore(at_once)
        self._calls: dict[Hashable, _Call] = {}
        """The latest call for each key."""

    @property
    def pending(self) -> int:
        """The number of calls that wait or run."""
        return sum(not each.result.done() for each in self._calls.values())

    def would_share(self, key: Hashable, fresh_for: float = 0.0) -> bool:
        """Tell whether a caller with this key gets the result of a call that was asked for."""
        call = self._calls.get(key)
        if call is None:
            return False
        if not call.result.done():
            return fresh_for > 0 or not call.has_begun
        return fresh_for > 0 and time.monotonic() < call.fresh_until

    async def __call__(
        self, call: Callable[[], Awaitable[T]], key: Hashable = None, fresh_for: float = 0.0
    ) -> T:
        """Return the result of a call that begins after this one.

        Callers that arrive while a call for the same key runs share the next one. With `fresh_for`,
        they also share the one that runs, and its result for so many seconds. What it raises is
        raised for all who share it.
        """
        if not self.would_share(key, fresh_for):
            self._start(call, key, fresh_for)
        result: T = await asyncio.shield(self._calls[key].result)  # a caller may leave
        return result

    def _start(self, call: Callable[[], Awaitable[Any]], key: Hashable, fresh_for: float) -> None:
        async def made() -> Any:
            async with self._turn:
                started.has_begun = True
                return await call()

        def ended(task: asyncio.Task[Any]) -> None:
            # This retrieves the exception, too: asyncio logs those that nothing has retrieved.
            failed = task.cancelled() or task.exception() is not None
            if (failed or not fresh_for) and self._calls.get(key) is started:
                del self._calls[key]

        now = time.monotonic()
        for other, each in [*self._calls.items()]:
            if each.result.done() and each.fresh_until <= now:
                del self._calls[other]
        task = asyncio.create_task(made(), name="shared call")
        started = self._calls[key] = _Call(task, now + fresh_for)
        task.add_done_callback(ended)
