"""Questions to the daemon from the event loop: in bounded threads, each asked once at a time."""

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from gpulease.client import Client
from gpulease.errors import NotAllowed, TooMany

Answer = TypeVar("Answer")

ANSWER_WITHIN_S = 10.0
_THREADS = 8
_MOST_PENDING = 32
_FRESH_FOR_S = 1.0
_CHECKED_FOR_S = 10.0


@dataclass(slots=True)
class _Asked:
    """A question that was sent, and until when others may have its answer."""

    answer: asyncio.Future[Any]
    fresh_until: float


class DaemonReader:
    """Asks the daemon for all browsers together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(_THREADS, "daemon")
        self._asked: dict[Hashable, _Asked] = {}
        self._checked_until = 0.0

    @property
    def path(self) -> object:
        """The daemon's socket."""
        return self._client.path

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
        self._forget()
        asked = self._asked.get(key)
        if asked is None:
            if sum(not each.answer.done() for each in self._asked.values()) >= _MOST_PENDING:
                raise TooMany("cannot ask the daemon: too many requests wait for it")
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, self._answer, question)
            asked = self._asked[key] = _Asked(future, time.monotonic() + fresh_for)
        # If one browser disconnects, the others still get the answer.
        answer: Answer = await asyncio.shield(asked.answer)
        return answer

    def _forget(self) -> None:
        """Forget the answers that are old, and those that were errors: the daemon may be back."""
        now = time.monotonic()
        done = [(key, each) for key, each in self._asked.items() if each.answer.done()]
        for key, each in done:
            # This retrieves the exception, too: asyncio logs those that nothing has retrieved.
            failed = each.answer.cancelled() or each.answer.exception() is not None
            if failed or each.fresh_until <= now:
                del self._asked[key]

    def _answer(self, question: Callable[[Client], Answer]) -> Answer:
        """Ask, once it is sure that the daemon treats this process as any user."""
        if time.monotonic() >= self._checked_until:
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
