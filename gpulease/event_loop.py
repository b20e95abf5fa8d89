"""A small event loop of ready descriptors and named timers, and bytes that wait for a descriptor.

No threads, no asyncio. Standard library only: the shim imports this, and so does `gpulease run`.
"""

from __future__ import annotations

import select
import time
from itertools import islice

TYPE_CHECKING = False  # `typing` takes as long to import as the interpreter to start
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    Callback = Callable[[], object]
else:
    from _collections import deque

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
            # Looked up again for each event: the first callback may have removed the second.
            for place, wanted in enumerate((_READABLE, _WRITABLE)):
                ready = self._callbacks.get(fd, (None, None))[place]
                if events & wanted and ready is not None:
                    ready()
        now = self.now()
        for name, (at, callback) in list(self._timers.items()):
            # A callback before may have cancelled or replaced this timer.
            if at <= now and self._timers.get(name) == (at, callback):
                del self._timers[name]
                callback()

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


Piece = bytes | bytearray | memoryview

_SMALL = 4096
"""Bytes. Smaller pieces are joined, or a million single bytes would take 100 MB."""
_JOINED = 64 << 10
"""Bytes. A joined piece that is longer than this is not extended."""
_MOST_AT_ONCE = 64
"""Buffers in one call; the system's own limit is 1024 (IOV_MAX)."""


class WriteBuffer:
    """Bytes that wait until a descriptor that does not block takes them."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes in the queue."""
        self._pieces: deque[Piece] = deque()

    def add(self, piece: Piece) -> None:
        """Append `piece`. A view or a bytearray, which may change later, is copied."""
        self.size += len(piece)
        if len(piece) >= _SMALL:
            self._pieces.append(bytes(piece))
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < _JOINED:
            last += piece
        elif piece:
            self._pieces.append(bytearray(piece))

    def write(self, writer: Callable[[list[Piece]], int]) -> None:
        """Pass everything to `writer`, which returns how many bytes it took.

        Raises:
            OSError: from `writer`, such as BlockingIOError when it takes no more for now.
        """
        while self.size:
            self.write_once(writer)

    def write_once(self, writer: Callable[[list[Piece]], int]) -> None:
        """Pass the first pieces to `writer`, which returns how many bytes it took."""
        self._drop(writer(list(islice(self._pieces, _MOST_AT_ONCE))))

    def clear(self) -> None:
        """Drop everything."""
        self._pieces.clear()
        self.size = 0

    def _drop(self, size: int) -> None:
        self.size -= size
        while size and len(self._pieces[0]) <= size:
            size -= len(self._pieces.popleft())
        if size:
            self._pieces[0] = memoryview(self._pieces[0])[size:]
