"""A small event loop of ready descriptors and named timers, without threads and asyncio.

Standard library only: the shim imports this, and so does `gpulease run`.
"""

from __future__ import annotations

import select
import time

TYPE_CHECKING = False  # `typing` takes as long to import as the interpreter to start
if TYPE_CHECKING:
    from collections.abc import Callable

    Callback = Callable[[], object]

_LONGEST_SLEEP = 3600.0
_READABLE, _WRITABLE = ~select.POLLOUT, ~select.POLLIN
"""Errors and hang-ups count as both."""


class EventLoop:
    """Call back when a descriptor is ready or a timer is due.

    Timers use the monotonic clock, in seconds: setting the system's clock does not affect them.
    """

    def __init__(self) -> None:
        # poll(2) and not epoll(7): standard input may be a regular file.
        self._poll = select.poll()
        self._callbacks: dict[int, tuple[Callback | None, Callback | None]] = {}
        self._timers: dict[str, tuple[float, Callback]] = {}

    def now(self) -> float:
        """Return the time on the loop's clock."""
        return time.monotonic()

    def on_readable(self, fd: int, callback: Callback | None) -> None:
        """Call `callback` whenever `fd` is readable; None stops that."""
        self._watch(fd, callback, self._callbacks.get(fd, (None, None))[1])

    def on_writable(self, fd: int, callback: Callback | None) -> None:
        """Call `callback` whenever `fd` is writable; None stops that."""
        self._watch(fd, self._callbacks.get(fd, (None, None))[0], callback)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. Call this before `fd` is closed."""
        self._watch(fd, None, None)

    def set_timer(self, name: str, at: float, callback: Callback) -> None:
        """Call `callback` once at the time `at`. This replaces the timer of the same name."""
        self._timers[name] = (at, callback)

    def set_timer_after(self, name: str, seconds: float, callback: Callback) -> None:
        """Call `callback` once, `seconds` from now. This replaces the timer of the same name."""
        self.set_timer(name, self.now() + seconds, callback)

    def cancel_timer(self, name: str) -> None:
        """Cancel the timer of this name, if there is one."""
        self._timers.pop(name, None)

    def step(self) -> None:
        """Wait until something is due, and call back."""
        now = self.now()
        soonest = min((at for at, _ in self._timers.values()), default=now + _LONGEST_SLEEP)
        wait = min(max(0.0, soonest - now), _LONGEST_SLEEP)
        for fd, events in self._poll.poll(wait * 1000):
            self._dispatch(fd, events)
        self._run_due_timers()

    def _watch(self, fd: int, readable: Callback | None, writable: Callback | None) -> None:
        before = self._callbacks.get(fd, (None, None))
        if before == (readable, writable):
            return
        events = (select.POLLIN if readable else 0) | (select.POLLOUT if writable else 0)
        if events:
            self._callbacks[fd] = (readable, writable)
            self._poll.register(fd, events)
        else:
            del self._callbacks[fd]
            self._poll.unregister(fd)

    def _dispatch(self, fd: int, events: int) -> None:
        # Looked up again for each event: the first callback may have removed the second.
        for place, wanted in enumerate((_READABLE, _WRITABLE)):
            callback = self._callbacks.get(fd, (None, None))[place]
            if events & wanted and callback is not None:
                callback()

    def _run_due_timers(self) -> None:
        now = self.now()
        for name, (at, callback) in list(self._timers.items()):
            if at <= now and self._timers.get(name) == (at, callback):
                del self._timers[name]
                callback()
