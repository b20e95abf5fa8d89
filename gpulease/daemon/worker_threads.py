"""Threads of the daemon, one for each kind of work that blocks."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.service.log_once import LogOnce

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WELL_AFTER_S = 60.0
"""Without a failure. A little goes on a disk that is nearly full, and the next write does not."""


class WorkerThread:
    """One thread: what is given to it happens in order, and never on the event loop."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Let what was given finish."""
        self._pool.shutdown(wait=True)


class WriterThread(WorkerThread):
    """The lane of all writes to the record, which tells the log that they fail.

    Whoever wrote tries again, and need not say it too.
    """

    def __init__(self, name: str, steady: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name)
        self._steady = steady
        self._complaints = LogOnce(_log)
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
            self._complaints.say("record", f"{error.message}; {error.hint}", level=level)
            raise
        if self._steady() - self._failed_at >= _WELL_AFTER_S and self._complaints.passed("record"):
            _log.info("the record can be written again")
        return done


class ObservationThread(WorkerThread):
    """A lane for looks at the GPUs; a driver that hangs must not hold up the daemon's end."""

    def close(self) -> None:
        """Leave what hangs behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
