"""The daemon's threads, one for each kind of blocking work."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gpulease.call_thread import CallThread
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.service.log_once import LogOnce

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WELL_AFTER_S = 60.0
"""Time without a failure. On a nearly full disk, small writes succeed between failures."""


class WorkerThread:
    """One thread, which runs calls in order and away from the event loop."""

    def __init__(self, name: str) -> None:
        self._thread: CallThread[Any] = CallThread(name, time.monotonic)

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        return asyncio.wrap_future(self._thread.enqueue(call).outcome)

    def close(self) -> None:
        """Finish the pending calls."""
        self._thread.close(wait=True)


class WriterThread(WorkerThread):
    """Runs all writes to the database, and logs their failures.

    Callers try again, and do not log the failure a second time.
    """

    def __init__(self, name: str, steady: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name)
        self._steady = steady
        self._failures = LogOnce(_log)
        self._failed_at = -_WELL_AFTER_S

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        return super().__call__(lambda: self._watched(call))

    def _watched(self, call: Callable[[], T]) -> T:
        try:
            done = call()
        except RecordUnwritable as error:
            self._failed_at = self._steady()
            error.is_in_the_log = True
            level = logging.ERROR if isinstance(error, RecordDamaged) else logging.WARNING
            self._failures.say("record", f"{error.message}; {error.hint}", level=level)
            raise
        if self._steady() - self._failed_at >= _WELL_AFTER_S and self._failures.passed("record"):
            _log.info("the database can be written again")
        return done


class ObservationThread(WorkerThread):
    """Runs observations of the GPUs; a driver that hangs must not delay the daemon's end."""

    def close(self) -> None:
        """Do not wait for a call that hangs."""
        self._thread.close()
