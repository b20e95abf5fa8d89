"""Threads of the daemon, one for each kind of work that blocks."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """One thread: what is given to it happens in order, and never on the event loop."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Let what was given finish."""
        self._pool.shutdown(wait=True)


class LookLane(Lane):
    """A lane for looks at the GPUs; a driver that hangs must not hold up the daemon's end."""

    def close(self) -> None:
        """Leave what hangs behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
