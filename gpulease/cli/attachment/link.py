"""The connection to a job's own socket: frames out as it takes them, frames in as they come.

Things to be done later, by whoever sits in poll(2) until then.
"""

import json
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator

from gpulease.cli.attachment.console import PIECE, Inlet, Outlet
from gpulease.wire.frames import HEADER, BadFrame, FrameKind, FrameReader
from gpulease.write_buffer import Outgoing

_SOCKET_ROOM = 1 << 20
"""Bytes that the system may hold on their way to the shim, where it allows so much."""
_HEAD = 4096
"""Bytes read where most of what comes is to be moved on unread."""
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class ShimConnection:
    """One connection; nothing here blocks."""

    def __init__(
        self, link: socket.socket, outlet: Callable[[FrameKind], Outlet | None] = lambda _: None
    ) -> None:
        """Speak over `link`; `outlet` says where output may go that nobody needs to look at."""
        link.setblocking(False)
        self._link = link
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_ROOM)
        self._frames = FrameReader(in_parts=(FrameKind.STDOUT, FrameKind.STDERR))
        self._unsent = Outgoing(link)
        self._outlet = outlet
        self._moved = False
        """What came last went on unread."""
        self.deaf = False
        """The shim reads no more; it may still have something to say."""
        self.gone = False
        """The shim has closed, or says what no shim says."""

    def fileno(self) -> int:
        """Return what to poll."""
        return self._link.fileno()

    @property
    def has_room(self) -> bool:
        """Whether more input may be read for it."""
        return self._unsent.size < PIECE

    def wanted(self, *, reading: bool) -> int:
        """Return the events to poll for."""
        return (select.POLLIN if reading else 0) | (select.POLLOUT if self._unsent.size else 0)

    def put(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Queue a frame."""
        if not self.deaf:
            self._unsent.add(HEADER.pack(kind, len(payload)))
            self._unsent.add(payload)

    def put_from(self, inlet: Inlet) -> int | None:
        """Queue a frame of input that is not copied, and return its size.

        0: there is none now, or no more. None: it has to be read.
        """
        if self.deaf or self._unsent.pours:
            return None
        size = inlet.fill()
        if size:
            self._unsent.add(HEADER.pack(FrameKind.STDIN, size))
            self._unsent.pour(inlet.conduit)
        return size

    def tell(self, kind: FrameKind, **content: object) -> None:
        """Queue a frame of JSON."""
        self.put(kind, json.dumps(content).encode())

    def signal(self, signum: signal.Signals) -> None:
        """Queue a signal for the job."""
        self.tell(FrameKind.SIGNAL, signal=int(signum))

    def exchange(self, events: int) -> Iterator[tuple[FrameKind, bytes]]:
        """Send what `events` of poll say there is room for, and yield the frames that came."""
        if events & select.POLLOUT:
            self.send()
        if events & _READABLE:
            yield from self._receive()

    def send(self) -> None:
        """Send what it takes."""
        try:
            self._unsent.write()
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
            self.deaf = True

    def flush(self, within: float) -> None:
        """Send all that is queued, if the shim takes it within so many seconds."""
        poller = select.poll()
        poller.register(self._link, select.POLLOUT)
        while self._unsent.size and poller.poll(within * 1000):
            self.send()

    def _receive(self) -> Iterator[tuple[FrameKind, bytes]]:
        if self._moves():
            return
        try:
            piece = self._link.recv(_HEAD if self._moved else 2 * PIECE)
            self._moved = False
            self.gone = not piece
            yield from self._frames.feed(piece)
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self.gone = True

    def _moves(self) -> bool:
        """Move output on, if that is what comes next and nobody needs to look at it."""
        outlet = self._outlet(self._frames.passing) if self._frames.rest else None
        size = outlet.move(self._link.fileno(), self._frames.rest) if outlet is not None else None
        if size is None:
            return False
        self._frames.took(size)
        self._moved = True
        return True


def read_json(payload: bytes) -> dict[str, object]:
    """Return what a frame of JSON says; nothing for what is none."""
    try:
        found = json.loads(payload)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Alarms:
    """At most one of each name."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called in so many seconds."""
        self._set[name] = (time.monotonic() + seconds, call)

    def drop(self, name: str) -> None:
        """Forget what was to be done."""
        self._set.pop(name, None)

    def patience(self, *others: float) -> float | None:
        """Return for how many milliseconds nothing has to happen; `others` are seconds."""
        now = time.monotonic()
        spans = [*(at - now for at, _ in self._set.values()), *others]
        return max(0.0, min(spans)) * 1000 + 1 if spans else None

    def ring(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for name in [name for name, (at, _) in self._set.items() if at <= now]:
            self._set.pop(name)[1]()
