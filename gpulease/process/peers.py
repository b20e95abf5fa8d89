"""Who is connected to the job's socket: one that attaches, some that watch, the daemon.

Nothing that a peer sends or omits may hold up the job: queues, numbers and patience are bounded.
Only the attached one may slow it down, by reading slowly, as a terminal would.
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol

from gpulease.frames import BadFrame, FrameKind, FrameReader, frame
from gpulease.process.loop import Loop

ROOM = 1 << 20
"""Bytes that may wait for one peer."""
MOST_PEERS = 64
_MOST_OF_USER = 48
"""The others are kept for the daemon and root, so that a user cannot lock them out."""
_PIECE = 64 << 10
_LARGEST_WRITE = 256 << 10
_HELLO_PATIENCE_S = 10.0
_LINGER_PATIENCE_S = {False: 30.0, True: 24 * 3600.0}
"""How long a peer that takes nothing is waited for at the end: one who watches, and one who is
attached and may just have a pager open."""
_NONSENSE = (
    BadFrame,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading a payload may raise when its sender does not speak our language."""
_CREDENTIALS = struct.Struct("iII")


class Role(StrEnum):
    """What a peer came for."""

    ATTACH = "attach"
    WATCH = "watch"
    CONTROL = "control"


class Peer:
    """One connection."""

    def __init__(self, peers: "Peers", sock: socket.socket, uid: int, now: float) -> None:
        self.uid = uid
        self.role: Role | None = None
        self.gone = False
        self.refused = False
        self.since = now
        """Since when we have waited for it: to say hello, or to take more of what is queued."""
        self._peers = peers
        self._sock = sock
        self._reader = FrameReader()
        self._queue = bytearray()
        self._skipped = 0
        peers.loop.on_readable(sock.fileno(), self._read)

    @property
    def queued(self) -> int:
        """Bytes that wait for this peer."""
        return len(self._queue)

    def send(self, data: bytes) -> None:
        """Queue encoded frames, and pass on what the socket takes."""
        if self.gone or self.refused:
            return
        was_idle = not self._queue
        self._queue += data
        if was_idle:
            self.since = self._peers.loop.now()
            self._write()

    def show(self, data: bytes, size: int) -> None:
        """Send output of `size` bytes, or count it as skipped by one that only watches and lags."""
        if self.role is Role.WATCH and self.queued > ROOM:
            self._skipped += size
            return
        if self._skipped:
            self.send(_json_frame(FrameKind.SKIPPED, {"bytes": self._skipped}))
            self._skipped = 0
        self.send(data)

    def listen(self, on: bool) -> None:
        """Take more frames from this peer, or not for now."""
        if not self.gone:
            self._peers.loop.on_readable(self._sock.fileno(), self._read if on else None)

    def refuse(self, message: str) -> None:
        """Say why, and hear no more of it; it is dropped when it closes, or after a while.

        Closing at once would make the system discard the message if the peer is still talking.
        """
        self.send(_json_frame(FrameKind.REFUSED, {"message": message}))
        self.role, self.refused, self.since = None, True, self._peers.loop.now()

    def drop(self) -> None:
        """Close the connection."""
        if self.gone:
            return
        self.gone = True
        self._peers.loop.forget(self._sock.fileno())
        self._sock.close()
        self._peers.lost(self)

    def _read(self) -> None:
        try:
            piece = self._sock.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.drop()
            return
        try:
            for kind, payload in self._reader.feed(piece):
                if not self.gone and not self.refused:
                    self._peers.handle(self, kind, payload)
        except _NONSENSE:
            self.drop()

    def _write(self) -> None:
        try:
            while self._queue:
                with memoryview(self._queue) as waiting:
                    sent = self._sock.send(waiting[:_LARGEST_WRITE])
                del self._queue[:sent]
                self.since = self._peers.loop.now()
        except BlockingIOError:
            self._peers.loop.on_writable(self._sock.fileno(), self._write)
            return
        except OSError:
            self.drop()
            return
        self._peers.loop.on_writable(self._sock.fileno(), None)


class Orders(Protocol):
    """What peers may want of the shim."""

    def welcome(self, peer: Peer) -> None:
        """Tell a peer that has said its role what happened before it came."""

    def obey(self, peer: Peer, kind: FrameKind, payload: bytes) -> None:
        """Carry out a frame."""

    def left_alone(self) -> None:
        """Go on without the attached peer, which was lost."""


class Peers:
    """All connections to one job."""

    def __init__(
        self, loop: Loop, listener: socket.socket, owner: int, daemon: int, orders: Orders
    ) -> None:
        self.loop = loop
        self.attached: Peer | None = None
        self._listener = listener
        self._masters = {0, daemon}
        self._owner = owner
        self._orders = orders
        self._all: list[Peer] = []
        self._held: bytearray | None = None
        listener.setblocking(False)
        loop.on_readable(listener.fileno(), self.accept)

    @property
    def has_room(self) -> bool:
        """Whether more output may be read: the attached one keeps up, or none is held back."""
        waiting = self.attached.queued if self.attached else len(self._held or b"")
        return waiting <= ROOM

    @property
    def is_holding(self) -> bool:
        """Whether output is being held for the first one that attaches."""
        return self._held is not None

    def hold(self) -> None:
        """Keep output for the first peer that attaches."""
        self._held = bytearray()

    def release(self) -> bytes | None:
        """Stop holding, and return what was held; None if nothing was to be held."""
        held, self._held = self._held, None
        return None if held is None else bytes(held)

    def show(self, kind: FrameKind, piece: bytes) -> None:
        """Send output to everyone who wants it."""
        data = frame(kind, piece)
        if self._held is not None:
            self._held += data
        for peer in self._those_of(Role.ATTACH, Role.WATCH):
            peer.show(data, len(piece))

    def tell(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        """Send news to everyone who has said hello."""
        for peer in self._those_of(*Role):
            peer.send(_json_frame(kind, content))

    def accept(self) -> None:
        """Take in all who knock."""
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            sock.setblocking(False)
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            peer = Peer(self, sock, _CREDENTIALS.unpack(raw)[1], self.loop.now())
            self._all.append(peer)
            if peer.uid != self._owner and peer.uid not in self._masters:
                peer.refuse("this job is someone else's")
            elif len(self._all) > (MOST_PEERS if peer.uid in self._masters else _MOST_OF_USER):
                peer.refuse("too many are connected to this job")
                peer.drop()
            self._mind_the_silent()

    def handle(self, peer: Peer, kind: FrameKind, payload: bytes) -> None:
        """Take a frame from a peer."""
        if peer.role is not None:
            self._orders.obey(peer, kind, payload)
        elif kind is FrameKind.HELLO:
            self._greet(peer, Role(json.loads(payload)["role"]))
        else:
            peer.refuse("the first frame has to be HELLO")

    def lost(self, peer: Peer) -> None:
        """Forget a peer whose connection has ended."""
        self._all.remove(peer)
        if peer is self.attached:
            self.attached = None
            self._orders.left_alone()

    def begin_farewell(self) -> None:
        """Take in who has knocked by now, and start everyone's patience anew."""
        self.accept()
        for peer in self._all:
            peer.since = self.loop.now()

    def all_served(self) -> bool:
        """Tell whether everyone has what was meant for them; drop those who take nothing."""
        for peer in list(self._all):
            patience_s = _LINGER_PATIENCE_S[peer.role is Role.ATTACH]
            if peer.queued and peer.since < self.loop.now() - patience_s:
                peer.drop()
        return not any(
            peer.queued or (peer.role is None and not peer.refused) for peer in self._all
        )

    def _greet(self, peer: Peer, role: Role) -> None:
        if role is Role.CONTROL and peer.uid not in self._masters:
            peer.refuse("only the daemon may control a job this way")
            return
        if role is Role.ATTACH:
            former, self.attached = self.attached, peer
            if former is not None:
                former.refuse("another terminal has attached to this job")
        peer.role = role
        self._orders.welcome(peer)

    def _mind_the_silent(self) -> None:
        """Drop those who have said no hello in time, and come back for the others."""
        silent = [peer for peer in self._all if peer.role is None]
        for peer in silent:
            if peer.since + _HELLO_PATIENCE_S <= self.loop.now():
                peer.drop()
        if silent:
            again: Callable[[], None] = self._mind_the_silent
            self.loop.set_timer("hello", self.loop.now() + _HELLO_PATIENCE_S / 2, again)

    def _those_of(self, *roles: Role) -> list[Peer]:
        return [peer for peer in self._all if peer.role in roles]


def _json_frame(kind: FrameKind, content: Mapping[str, Any]) -> bytes:
    return frame(kind, json.dumps(content).encode())
