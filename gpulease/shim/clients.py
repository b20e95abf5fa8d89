"""Who is connected to the job's socket: one that attaches, some that watch, the daemon.

Nothing that a peer sends or omits may hold up the job: queues, numbers and patience are bounded.
Only the attached one may slow it down, by reading slowly, as a terminal would. Who that is depends
on what the job runs on: on a terminal the newest that comes writes, and whoever wrote before
watches; on pipes the first one keeps the input, of which there is only one.
"""

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gpulease.event_loop import Loop
from gpulease.shim.connection import Payload, Role, ShimClient
from gpulease.wire.frames import HEADER, BadFrame, FrameKind

_HELD_ROOM = 1 << 20
"""Bytes that are held for the first who attaches before the job has to wait for them."""
_UNSENT_ROOM = 128 << 10
"""Bytes that may wait for the attached one: what pipe and socket hold comes on top."""
MOST_PEERS = 64
_MOST_OF_USER = 48
"""The others are kept for the daemon and root, so that a user cannot lock them out."""
_HELLO_PATIENCE_S = 10.0
_LINGER_PATIENCE_S = {False: 30.0, True: 24 * 3600.0}
"""How long a peer that takes nothing is waited for at the end: one who watches, and one who is
attached and may just have a pager open."""
_CREDENTIALS = struct.Struct("iII")


class Orders(Protocol):
    """What peers may want of the shim."""

    def welcome(self, peer: ShimClient) -> None:
        """Tell a peer that has said its role what happened before it came."""

    def seat(self, peer: ShimClient, hello: Payload) -> None:
        """Go on with a peer that is the attached one now, and has sent this HELLO."""

    def obey(self, peer: ShimClient, kind: FrameKind, payload: bytes) -> None:
        """Carry out a frame."""

    def met_bug(self, error: Exception) -> None:
        """Put on record that a frame of a peer made this process fail."""

    def left_alone(self) -> None:
        """Go on without the attached peer, which was lost."""


class ShimClients:
    """All connections to one job."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        uids: tuple[int, int],
        newest_writes: bool,
        orders: Orders,
    ) -> None:
        """Serve whoever connects to `listener`, of these uids: the owner's, and the daemon's."""
        owner, daemon = uids
        self.loop = loop
        self.attached: ShimClient | None = None
        self._listener = listener
        self._masters = {0, daemon}
        self._owner = owner
        self._newest_writes = newest_writes
        self._orders = orders
        self._all: list[ShimClient] = []
        self._held: bytearray | None = None
        listener.setblocking(False)
        loop.on_readable(listener.fileno(), self.accept)

    @property
    def has_room(self) -> bool:
        """Whether more output may be read: the attached one keeps up, or none is held back."""
        if self.attached is not None:
            return self.attached.queued <= _UNSENT_ROOM
        return self._held is None or len(self._held) <= _HELD_ROOM

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

    def show(self, kind: FrameKind, piece: bytes | memoryview) -> None:
        """Send output to everyone who wants it; `piece` may change afterwards."""
        if self._held is not None:
            self._held += HEADER.pack(kind, len(piece))
            self._held += piece
        for peer in self._those_of(Role.ATTACH, Role.WATCH):
            peer.show(kind, piece)

    @property
    def only_one(self) -> ShimClient | None:
        """Return the attached peer, if nobody else listens and it has had everything so far."""
        listening = self._those_of(Role.ATTACH, Role.WATCH)
        if self._held is None and listening == [self.attached] and listening[0].is_level:
            return listening[0]
        return None

    def tell(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        """Send news to everyone who has said hello."""
        for peer in self._those_of(*Role):
            peer.tell(kind, content)

    def accept(self) -> None:
        """Take in all who knock."""
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            sock.setblocking(False)
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            peer = ShimClient(self, sock, _CREDENTIALS.unpack(raw)[1], self.loop.now())
            self._all.append(peer)
            if peer.uid != self._owner and peer.uid not in self._masters:
                peer.refuse("this job is someone else's")
            elif self._is_full_for(peer):
                peer.refuse("too many are connected to this job")
                peer.drop()
            self._mind_the_silent()

    def _is_full_for(self, peer: ShimClient) -> bool:
        """Tell whether there is no place for `peer`; the places of those who have left are free."""
        most = MOST_PEERS if peer.uid in self._masters else _MOST_OF_USER
        if len(self._all) > most:
            for other in list(self._all):
                other.hear_out()
        return len(self._all) > most

    def handle(self, peer: ShimClient, kind: FrameKind, payload: bytes) -> None:
        """Take a frame from a peer."""
        if kind is FrameKind.HELLO:
            self._greet(peer, Payload(payload))
        elif peer.role is not None:
            self._orders.obey(peer, kind, payload)
        else:
            peer.refuse("the first frame has to be HELLO")

    def met_bug(self, error: Exception) -> None:
        """Pass on that a frame of a peer made this process fail."""
        self._orders.met_bug(error)

    def lost(self, peer: ShimClient) -> None:
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

    def _greet(self, peer: ShimClient, hello: Payload) -> None:
        role, is_new = _role(hello), peer.role is None
        if not is_new and (peer.role is not Role.WATCH or role is not Role.ATTACH):
            return  # said twice; who watches may ask to write
        if role is Role.CONTROL and peer.uid not in self._masters:
            peer.refuse("only the daemon may control a job this way")
            return
        peer.role = self._seat_or_watch(peer) if role is Role.ATTACH else role
        if is_new:
            self._orders.welcome(peer)
        if peer is self.attached:
            peer.widen()
            self._orders.seat(peer, hello)

    def _seat_or_watch(self, peer: ShimClient) -> Role:
        """Make `peer` the attached one, if it may be, and return its role."""
        former = self.attached
        if former is not None and not self._newest_writes:
            peer.tell(FrameKind.WATCHING, {})
            return Role.WATCH
        self.attached = peer
        if former is not None:
            former.role = Role.WATCH
            former.listen(True)
            former.tell(FrameKind.WATCHING, {})
        return Role.ATTACH

    def _mind_the_silent(self) -> None:
        """Drop those who have said no hello in time, and come back for the others."""
        silent = [peer for peer in self._all if peer.role is None]
        for peer in silent:
            if peer.since + _HELLO_PATIENCE_S <= self.loop.now():
                peer.drop()
        if silent:
            again: Callable[[], None] = self._mind_the_silent
            self.loop.set_timer("hello", self.loop.now() + _HELLO_PATIENCE_S / 2, again)

    def _those_of(self, *roles: Role) -> list[ShimClient]:
        return [peer for peer in self._all if peer.role in roles]


def _role(hello: Payload) -> Role:
    try:
        return Role(hello.text("role"))
    except ValueError as error:
        raise BadFrame("no such role") from error
