"""One connection to a job's socket: frames in, frames out, and a bound on what waits for it.

The JSON in a peer's frame, field by field: what is not as it should be is a `BadFrame`.

All else that goes wrong with a frame is an error of the shim's own.
"""

import json
import math
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from gpulease.event_loop import Loop
from gpulease.wire.frames import HEADER, BadFrame, FrameKind, FrameReader, frame
from gpulease.write_buffer import Conduit, Outgoing

ROOM = 1 << 20
"""Bytes that may wait for one who only watches."""
_BUFFER = memoryview(bytearray(256 << 10))
"""What arrives, until it is cut into frames; one for all, since they take turns."""
_HEAD = 4096
"""Bytes read where most of what comes is to be poured."""
_LAST_WORDS = 16
"""Times that we read at most of one who has hung up: more than a socket holds."""
_SOCKET_ROOM = 1 << 20
"""Bytes that the system may hold for one who is attached, where it allows so much."""


class Role(StrEnum):
    """What a peer came for."""

    ATTACH = "attach"
    WATCH = "watch"
    CONTROL = "control"


class Host(Protocol):
    """Who a connection belongs to."""

    @property
    def loop(self) -> Loop:
        """Where the connection is watched."""

    def handle(self, peer: "ShimClient", kind: FrameKind, payload: bytes) -> None:
        """Take a frame from a peer."""

    def met_bug(self, error: Exception) -> None:
        """Put on record that a frame made this process fail, whatever was in it."""

    def lost(self, peer: "ShimClient") -> None:
        """Forget a peer whose connection has ended."""


class ShimClient:
    """One connection."""

    def __init__(self, host: Host, sock: socket.socket, uid: int, now: float) -> None:
        self.uid = uid
        self.role: Role | None = None
        self.gone = False
        self.refused = False
        self.since = now
        """Since when we have waited for it: to say hello, or to take more of what is queued."""
        self._host = host
        self._sock = sock
        self.pour: Callable[[int, int], int | None] | None = None
        """Take so much of the input off this descriptor, and return how much that was; None: it
        has to be read and fed."""
        self._reader = FrameReader(in_parts={FrameKind.STDIN})
        self._queue = Outgoing(sock)
        self._skipped = 0
        host.loop.on_readable(sock.fileno(), self._read)

    @property
    def queued(self) -> int:
        """Bytes that wait for this peer."""
        return self._queue.size

    def send(self, *parts: bytes | memoryview) -> None:
        """Pass encoded frames, in a few parts, on to the socket, and keep what it does not take."""
        if self.gone or self.refused:
            return
        sent = 0
        if not self._queue.size:
            self.since = self._host.loop.now()
            sent = self._send_at_once(parts)
        for part in parts:
            self._queue.add(memoryview(part)[sent:] if sent else part)
            sent = max(sent - len(part), 0)

    def send_from(self, conduit: Conduit, kind: FrameKind) -> None:
        """Send a frame with what `conduit` holds, uncopied; only while nothing is queued."""
        self.send(HEADER.pack(kind, conduit.held))
        self._queue.pour(conduit)
        self._write()

    def _send_at_once(self, parts: Sequence[bytes | memoryview]) -> int:
        """Return how many bytes the socket took; the rest is called for when it takes more."""
        try:
            sent = self._sock.sendmsg(parts)
        except OSError:
            sent = 0  # whatever it was, the next try will tell
        if sent < sum(map(len, parts)):
            self._host.loop.on_writable(self._sock.fileno(), self._write)
        return sent

    def tell(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        """Send news, and before it how much was skipped until then."""
        self._own_up()
        self.send(frame(kind, json.dumps(content).encode()))

    def show(self, kind: FrameKind, piece: bytes | memoryview) -> None:
        """Send output, or count it as skipped by one that only watches and lags."""
        if self.role is Role.WATCH and self.queued > ROOM:
            self._skipped += len(piece)
            return
        self._own_up()
        self.send(HEADER.pack(kind, len(piece)), piece)

    @property
    def is_level(self) -> bool:
        """Whether it has all that it was sent, or should have been."""
        return not (self._queue.size or self._skipped or self.gone or self.refused)

    def hear_out(self) -> None:
        """If it has hung up, take its last words and drop it."""
        if self.gone or self.pour is not None:
            return  # whose input goes to the job takes its time
        poller = select.poll()
        poller.register(self._sock, 0)  # and so of POLLHUP alone
        for _ in range(_LAST_WORDS if poller.poll(0) else 0):
            if not self.gone:
                self._read()

    def _own_up(self) -> None:
        """Say what was skipped."""
        if self._skipped:
            count, self._skipped = self._skipped, 0
            self.tell(FrameKind.SKIPPED, {"bytes": count})

    def listen(self, on: bool) -> None:
        """Take more frames from this peer, or not for now."""
        if not self.gone:
            self._host.loop.on_readable(self._sock.fileno(), self._read if on else None)

    def widen(self) -> None:
        """Let the system hold more for this peer, so that it comes less often for it."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_ROOM)

    def refuse(self, message: str) -> None:
        """Say why, and hear no more of it; it is dropped when it closes, or after a while.

        Closing at once would make the system discard the message if the peer is still talking.
        """
        self.tell(FrameKind.REFUSED, {"message": message})
        self.role, self.refused, self.since = None, True, self._host.loop.now()

    def drop(self) -> None:
        """Close the connection."""
        if self.gone:
            return
        self.gone = True
        self._host.loop.forget(self._sock.fileno())
        self._queue.clear()
        self._sock.close()
        self._host.lost(self)

    def _read(self) -> None:
        if self._pours():
            return
        try:
            size = self._sock.recv_into(_BUFFER, 0 if self.pour is None else _HEAD)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.drop()
            return
        self._take(_BUFFER[:size])

    def _take(self, piece: memoryview) -> None:
        """Hand on the frames in `piece`; who sends what is none is dropped."""
        try:
            for kind, payload in self._reader.feed(piece):
                if not self.gone and not self.refused:
                    self._host.handle(self, kind, payload)
        except BadFrame:
            self.drop()
        except Exception as error:  # noqa: BLE001  the job must not end with one connection
            self.drop()
            self._host.met_bug(error)

    def _pours(self) -> bool:
        """Have input taken past us, if that is what comes next; it goes to the worker uncopied."""
        if self.pour is None or not self._reader.rest:
            return False
        size = self.pour(self._sock.fileno(), self._reader.rest)
        if size is None:
            return False
        self._reader.took(size)
        return True

    def _write(self) -> None:
        before = self._queue.size
        try:
            self._queue.write()
        except BlockingIOError:
            if self._queue.size < before:
                self.since = self._host.loop.now()
            self._host.loop.on_writable(self._sock.fileno(), self._write)
            return
        except OSError:
            self.drop()
            return
        self._host.loop.on_writable(self._sock.fileno(), None)


class Payload:
    """One JSON object."""

    def __init__(self, encoded: bytes) -> None:
        """Read `encoded`.

        Raises:
            BadFrame: it is no JSON object; so does every method, for a field that cannot be.
        """
        try:
            self._content = _object(json.loads(encoded))
        except (ValueError, RecursionError) as error:
            raise BadFrame("a payload that is no JSON") from error

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def text(self, name: str) -> str:
        """Return a field that is a string."""
        value = self._value(name)
        if not isinstance(value, str):
            raise BadFrame(f"{name} is no text")
        return value

    def number(self, name: str) -> int:
        """Return a field that is a number, without its fraction."""
        return int(self.seconds(name))

    def seconds(self, name: str) -> float:
        """Return a field that is a number."""
        value = self._value(name)
        if not isinstance(value, int | float):
            raise BadFrame(f"{name} is no number")
        try:
            return _finite(float(value))
        except OverflowError as error:
            raise BadFrame(f"{name} is too large") from error

    def is_null(self, name: str) -> bool:
        """Tell whether a field is there and null."""
        return self._value(name) is None

    def inner(self, name: str) -> "Payload":
        """Return a field that is an object."""
        inner = Payload.__new__(Payload)
        inner._content = _object(self._value(name))
        return inner

    def _value(self, name: str) -> Any:
        try:
            return self._content[name]
        except KeyError:
            raise BadFrame(f"no {name}") from None


def _object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise BadFrame("a payload that is no object")
    return content


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise BadFrame("a number that is none")
    return number
