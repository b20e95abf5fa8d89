"""A small event loop: descriptors that are ready, and named timers. No threads, no asyncio."""

import selectors
import time
from collections.abc import Callable

Callback = Callable[[], None]
_LONGEST_SLEEP = 3600.0


class Loop:
    """Call back when a descriptor is ready or a moment has come.

    Moments are of the monotonic clock, in seconds: setting the wall clock changes nothing.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, tuple[Callback | None, Callback | None]] = {}
        self._timers: dict[str, tuple[float, Callback]] = {}

    def now(self) -> float:
        """Return the loop's clock."""
        return time.monotonic()

    def on_readable(self, fd: int, callback: Callback | None) -> None:
        """Call `callback` whenever `fd` can be read; None: no more."""
        self._watch(fd, callback, self._watched.get(fd, (None, None))[1])

    def on_writable(self, fd: int, callback: Callback | None) -> None:
        """Call `callback` whenever `fd` can be written; None: no more."""
        self._watch(fd, self._watched.get(fd, (None, None))[0], callback)

    def forget(self, fd: int) -> None:
        """Watch `fd` no longer; to be called before it is closed."""
        self._watch(fd, None, None)

    def set_timer(self, name: str, at: float, callback: Callback) -> None:
        """Call `callback` once at that moment, instead of what this name had before."""
        self._timers[name] = (at, callback)

    def cancel_timer(self, name: str) -> None:
        """Drop the timer of this name, if there is one."""
        self._timers.pop(name, None)

    def has_timer(self, name: str) -> bool:
        """Tell whether the timer of this name is still to come."""
        return name in self._timers

    def step(self) -> None:
        """Wait until something is due and call whom it concerns."""
        soonest = min((at for at, _ in self._timers.values()), default=self.now() + _LONGEST_SLEEP)
        wait = min(max(0.0, soonest - self.now()), _LONGEST_SLEEP)
        for key, events in self._selector.select(wait):
            self._dispatch(key.fd, events)
        self._ring()

    def _watch(self, fd: int, readable: Callback | None, writable: Callback | None) -> None:
        before = self._watched.get(fd, (None, None))
        if before == (readable, writable):
            return
        events = (selectors.EVENT_READ if readable else 0) | (
            selectors.EVENT_WRITE if writable else 0
        )
        if not events:
            del self._watched[fd]
            self._selector.unregister(fd)
            return
        self._watched[fd] = (readable, writable)
        if before == (None, None):
            self._selector.register(fd, events)
        else:
            self._selector.modify(fd, events)

    def _dispatch(self, fd: int, events: int) -> None:
        # Looked up again for each: the first callback may have dropped the second.
        for place, event in enumerate((selectors.EVENT_READ, selectors.EVENT_WRITE)):
            callback = self._watched.get(fd, (None, None))[place]
            if events & event and callback is not None:
                callback()

    def _ring(self) -> None:
        now = self.now()
        for name, (at, callback) in list(self._timers.items()):
            if at <= now and self._timers.get(name) == (at, callback):
                del self._timers[name]
                callback()
