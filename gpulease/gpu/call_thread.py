"""A thread that makes one call at a time, for callers who cannot wait for ever.

A call into the driver may hang, and nothing can interrupt it. So each GPU has a lane: whoever
waits for a call may walk away, and no second call is begun behind one that has not returned.

When to try again: pauses that double from one attempt to the next, while something is wrong.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Monotonic = Callable[[], float]
"""Seconds on a clock that never goes back."""

T = TypeVar("T")
_thread = threading.local()


def note_progress() -> None:
    """Note that the call which runs on this thread has come one step further."""
    running: tuple[Call[Any], Monotonic] | None = getattr(_thread, "running", None)
    if running is not None:
        call, clock = running
        call.progress_at = clock()


@dataclass(slots=True)
class Call(Generic[T]):
    """One call, begun at `began_at` on the lane's clock and ended at `ended_at`, if it has."""

    work: Callable[[], T]
    began_at: float
    progress_at: float
    """When it began or last came a step further."""
    ended_at: float | None = None
    outcome: Future[T] = field(default_factory=Future)

    def wait(self, seconds: float) -> bool:
        """Wait for the end at most so long; say whether it has come."""
        try:
            self.outcome.exception(timeout=max(0.0, seconds))
        except FutureTimeout:
            return False
        return True

    def wait_while_it_goes_on(self, step: float, whole: float, clock: Monotonic) -> bool:
        """Wait for the end while each step takes at most `step` seconds, and all of it `whole`."""
        until = self.began_at + whole
        while not self.wait(min(until, self.progress_at + step) - clock()):
            if clock() >= min(until, self.progress_at + step):
                return self.outcome.done()
        return True

    def run(self, clock: Monotonic) -> None:
        """Do the work and keep what came of it, for whoever still waits."""
        _thread.running = self, clock
        try:
            result = self.work()
        except Exception as error:  # noqa: BLE001 - raised again where the outcome is asked for
            self.ended_at = clock()
            self.outcome.set_exception(error)
        else:
            self.ended_at = clock()
            self.outcome.set_result(result)


class CallThread(Generic[T]):
    """One thread, one call at a time."""

    def __init__(self, name: str, clock: Monotonic) -> None:
        self._clock = clock
        self._queue: SimpleQueue[Call[T] | None] = SimpleQueue()
        self._latest: Call[T] | None = None
        # A daemon thread: one that hangs in the driver must not keep the process from exiting.
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Say whether a call has not returned yet."""
        return self._latest is not None and not self._latest.outcome.done()

    def ask(self, work: Callable[[], T]) -> Call[T]:
        """Begin `work`, or return the call that is still under way."""
        if self._latest is None or self._latest.outcome.done():
            now = self._clock()
            self._latest = Call(work, now, now)
            self._queue.put(self._latest)
        return self._latest

    def close(self) -> None:
        """Let the thread end once its call has returned."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run(self._clock)


class Retry:
    """The time of the next attempt, if there is to be one."""

    def __init__(self, first: timedelta, clock: Monotonic) -> None:
        self._first = first.total_seconds()
        self._pause = self._first
        self._at: float | None = None
        self._clock = clock

    @property
    def is_due(self) -> bool:
        """Say whether it is time for an attempt."""
        return self._at is not None and self._clock() >= self._at

    def wanted(self, longest: timedelta) -> None:
        """Plan an attempt after the current pause, unless one is planned already."""
        if self._at is None:
            self._at = self._clock() + min(self._pause, longest.total_seconds())
            self._pause = min(self._pause * 2, longest.total_seconds())

    def begun(self) -> None:
        """Take the planned attempt off; the next pause will be longer."""
        self._at = None

    def needless(self) -> None:
        """Forget about it: all is well, and the next trouble starts with the first pause."""
        self._at = None
        self._pause = self._first
