"""Questions to the daemon from the event loop: in bounded threads, each asked once at a time."""

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gpulease.client import Client
from gpulease.errors import NotAllowed, TooMany
from gpulease.shared_calls import SharedCalls

Answer = TypeVar("Answer")

ANSWER_WITHIN_S = 10.0
_THREADS = 8
_MOST_PENDING = 32
_FRESH_FOR_S = 1.0
_CHECKED_FOR_S = 10.0


class DaemonReader:
    """Asks the daemon for all browsers together."""

    def __init__(self, client: Client, *, is_private: bool = False) -> None:
        """Ask by `client`; `is_private`: only its user sees the answers."""
        self._client = client
        self._is_private = is_private
        self._threads = ThreadPoolExecutor(_THREADS, "daemon")
        self._shared = SharedCalls(_THREADS)
        self._checked_until = 0.0

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return Path(self._client.path)

    async def ask(
        self,
        key: Hashable,
        question: Callable[[Client], Answer],
        fresh_for: float = _FRESH_FOR_S,
    ) -> Answer:
        """Return the answer to a question, which may be up to `fresh_for` seconds old.

        Questions with an equal `key` share an answer.

        Raises:
            GpuleaseError: the daemon's error, NoDaemon, or TooMany if too many questions wait.
        """
        if self._is_private and fresh_for <= _FRESH_FOR_S:
            fresh_for = 0.0  # the user has just changed it, and looks what has become of it
        if not self._shared.would_share(key, fresh_for) and self._shared.pending >= _MOST_PENDING:
            raise TooMany("cannot ask the daemon: too many requests wait for it")
        loop = asyncio.get_running_loop()
        return await self._shared(
            lambda: loop.run_in_executor(self._threads, self._answer, question), key, fresh_for
        )

    def _answer(self, question: Callable[[Client], Answer]) -> Answer:
        """Ask, once it is sure that the daemon treats this process as any user."""
        if not self._is_private and time.monotonic() >= self._checked_until:
            if self._client.doctor().sees_hidden:
                raise NotAllowed(
                    "cannot show this machine: its admin hides what users run, and gpulease-web "
                    "runs as an admin, who sees it",
                    "run gpulease-web as a user without jobs who is not in the group of admins",
                )
            self._checked_until = time.monotonic() + _CHECKED_FOR_S
        return question(self._client)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
