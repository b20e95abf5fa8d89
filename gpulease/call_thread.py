"""Threads that make calls which may hang, and the pauses between retries.

A call into the driver, a read of /proc or a look-up of a user may hang, and nothing can interrupt
it. Each `CallThread` makes one call at a time, and callers wait with a timeout. Standard library
only.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_thread = threading.local()


def note_progress() -> None:
    """Note that the call running on this thread has completed a step."""
    running: Call[Any] | None = getattr(_thread, "running", None)
    if running is not None:
        running.progress_at = time.monotonic()


@dataclass(slots=True)
class Call(Generic[T]):
    """One call. Its instants are seconds of `time.monotonic`."""

    work: Callable[[], T]
    began_at: float
    progress_at: float
    """When it began or last completed a step."""
    ended_at: float | None = None
    outcome: Future[T] = field(default_factory=Future)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; return whether it has ended."""
        try:
            self.outcome.exception(timeout=max(0.0, seconds))
        except FutureTimeout:
            return False
        return True

    def wait_while_progressing(self, step: float, total: float) -> bool:
        """Wait while each step takes at most `step` seconds and the call at most `total`.

        Return whether it has ended.
        """
        until = self.began_at + total
        while not self.wait(min(until, self.progress_at + step) - time.monotonic()):
            if time.monotonic() >= min(until, self.progress_at + step):
                return self.outcome.done()
        return True

    def run(self) -> None:
        """Do the work and keep its outcome for those who still wait."""
        if not self.outcome.set_running_or_notify_cancel():
            return
        _thread.running = self
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001 - raised again where the outcome is read
            self.ended_at = time.monotonic()
            self.outcome.set_exception(error)
        else:
            self.ended_at = time.monotonic()
            self.outcome.set_result(result)


class CallThread(Generic[T]):
    """One thread that makes one call at a time."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Call[T] | None] = SimpleQueue()
        self._latest: Call[T] | None = None
        # A daemon thread: one that hangs must not keep the process from exiting.
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned yet."""
        return self._latest is not None and not self._latest.outcome.done()

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Begin `work`, or return the call that has not returned yet."""
        if self._latest is None or self._latest.outcome.done():
            self._latest = self.enqueue(work)
        return self._latest

    def enqueue(self, work: Callable[[], T]) -> Call[T]:
        """Begin `work` when all earlier calls have returned."""
        now = time.monotonic()
        call = Call(work, now, now)
        self._queue.put(call)
        return call

    def close(self) -> None:
        """Let the thread end once its calls have returned."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()


class Retry:
    """The time of the next attempt, if one is planned; pauses double from one to the next."""

    def __init__(self, first: timedelta, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first.total_seconds()
        self._pause = self._first
        self._at: float | None = None
        self._clock = clock

    @property
    def is_due(self) -> bool:
        """Whether a planned attempt is due."""
        return self._at is not None and self._clock() >= self._at

    def schedule(self, longest: timedelta) -> None:
        """Plan an attempt after the current pause, unless one is planned."""
        if self._at is None:
            self._at = self._clock() + min(self._pause, longest.total_seconds())
            self._pause = min(self._pause * 2, longest.total_seconds())

    def start(self) -> None:
        """Note that the planned attempt has begun; the next pause is longer."""
        self._at = None

    def reset(self) -> None:
        """Cancel the planned attempt and begin again with the first pause."""
        self._at = None
        self._pause = self._first
