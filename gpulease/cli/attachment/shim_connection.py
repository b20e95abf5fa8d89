"""The connection to a job's socket: frames out as the shim takes them, frames in as they arrive."""

from __future__ import annotations

import select
from socket import SO_SNDBUF, SOL_SOCKET, socket

from gpulease.cli.attachment.console import PIECE
from gpulease.event_loop import WriteBuffer
from gpulease.light_json import decode_plain, encode
from gpulease.wire.frames import HEADER, BadFrame, FrameKind, FrameReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpulease.event_loop import EventLoop

_SOCKET_BUFFER = 1 << 20
"""Bytes that the kernel may hold on their way to the shim, where it allows so many."""


class ShimConnection:
    """One connection. Nothing here blocks."""

    def __init__(self, sock: socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(SOL_SOCKET, SO_SNDBUF, _SOCKET_BUFFER)
        self._sock = sock
        self._frames = FrameReader()
        self._unsent = WriteBuffer()
        self.is_deaf = False
        """The shim reads nothing more, but may still send."""
        self.is_closed = False
        """The shim has closed the connection, or does not speak the protocol."""

    @property
    def has_room(self) -> bool:
        """Whether to read more input for the shim."""
        return self._unsent.size < PIECE

    def watch(self, loop: EventLoop, receive: Callable[[], None] | None) -> None:
        """Send in `loop` what is queued, and call `receive` when frames arrive."""
        # With neither, the loop must not watch: poll(2) would report a hang-up over and over.
        loop.on_readable(self._sock.fileno(), receive)
        loop.on_writable(self._sock.fileno(), self.send if self._unsent.size else None)

    def put(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Queue a frame."""
        if not self.is_deaf:
            self._unsent.add(HEADER.pack(kind, len(payload)))
            self._unsent.add(payload)

    def put_json(self, kind: FrameKind, **content: object) -> None:
        """Queue a frame of JSON."""
        self.put(kind, encode(content))

    def signal(self, signum: int) -> None:
        """Queue a signal for the job."""
        self.put_json(FrameKind.SIGNAL, signal=signum)

    def send(self) -> None:
        """Send what the socket takes."""
        try:
            self._unsent.write(self._sock.sendmsg)
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
            self.is_deaf = True

    def flush(self, within_s: float) -> None:
        """Send all that is queued. Give up when the shim takes nothing for so many seconds."""
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while self._unsent.size and poller.poll(within_s * 1000):
            self.send()

    def receive(self) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames that have arrived."""
        try:
            piece = self._sock.recv(2 * PIECE)
            self.is_closed = not piece
            yield from self._frames.feed(piece)
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self.is_closed = True


def read_json(payload: bytes) -> dict[str, object]:
    """Return the JSON object in a frame; an empty one if there is none."""
    try:
        found = decode_plain(payload)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
