"""The clients of a job's socket: one that is attached, others that watch, and the daemon.

Nothing that a client sends or omits may hold up the job: queues, numbers of clients and waiting
times are bounded. Only the attached client may slow the job down, by reading slowly, as a terminal
would. Which one that is depends on the job. On a terminal the newest client writes, and the one
before it watches from then on. On pipes the first client keeps the input, of which there is only
one.
"""

from __future__ import annotations

import math
import select

from gpulease.event_loop import EventLoop, WriteBuffer
from gpulease.light_json import decode_plain, encode
from gpulease.peer_credentials import peer_credentials
from gpulease.wire.frames import HEADER, BadFrame, FrameKind, FrameReader, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from enum import StrEnum
    from typing import Any, Protocol
else:
    import _socket as socket

    Protocol, StrEnum = object, str  # as FrameKind is a number

WATCHER_BUFFER = 1 << 20
"""Bytes that may wait for a watcher; further output is skipped."""
MOST_CLIENTS = 64
_MOST_OF_USER = 48
"""The other places are for the daemon and root, so that a user cannot lock them out."""
_HELD_BUFFER = 1 << 20
"""Bytes that are held for the first client to attach before the job has to wait for it."""
_UNSENT_BUFFER = 128 << 10
"""Bytes that may wait for the attached client, besides those in the pipe and in the socket."""
_HELLO_WITHIN_S = 10.0
_WATCHER_READS_WITHIN_S = 30.0
_ATTACHED_READS_WITHIN_S = 24 * 3600.0
"""Time for a client that takes nothing after the end of the job; a user may have a pager open."""
_SOCKET_BUFFER = 1 << 20
"""Bytes that the kernel may hold for the attached client, where it allows so many."""
_READS_AFTER_HANG_UP = 16
"""Reads from a client that has hung up; a socket holds less than these can read."""
_BUFFER = memoryview(bytearray(256 << 10))
"""What was received last. All clients share it, since they take turns."""


class ClientRole(StrEnum):
    """What a client connects for."""

    ATTACH = "attach"
    WATCH = "watch"
    CONTROL = "control"


_ROLES = {"attach": ClientRole.ATTACH, "watch": ClientRole.WATCH, "control": ClientRole.CONTROL}


class ClientHandler(Protocol):
    """What the clients ask of the shim."""

    def welcome(self, client: ShimClient) -> None:
        """Send a new client what happened before it connected."""

    def attach(self, client: ShimClient, hello: Payload) -> None:
        """Continue with `client`, which sent this HELLO and is now the attached client."""

    def handle(self, client: ShimClient, kind: FrameKind, payload: bytes) -> None:
        """Act on a frame."""

    def log_bug(self, error: Exception) -> None:
        """Record that a client's frame made this process fail."""

    def detach(self) -> None:
        """Continue without the attached client, whose connection was lost."""


class ShimClient:
    """One connection: frames in, frames out, and a bound on what waits to be sent."""

    def __init__(self, clients: ShimClients, sock: socket.socket, uid: int) -> None:
        self.uid = uid
        self.role: ClientRole | None = None
        self.is_closed = False
        self.is_refused = False
        self.waiting_since = clients.loop.now()
        """Since when the shim waits for this client, to say HELLO or to take what is queued."""
        self._clients = clients
        self._loop = clients.loop
        self._sock = sock
        self._reader = FrameReader()
        self._queue = WriteBuffer()
        self._skipped = 0
        self._loop.on_readable(sock.fileno(), self._read)

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return self._queue.size

    def send(self, *parts: bytes | memoryview) -> None:
        """Send encoded frames, given in parts, and queue what the socket does not take."""
        if self.is_closed or self.is_refused:
            return
        sent = 0
        if not self._queue.size:
            self.waiting_since = self._loop.now()
            sent = self._send_at_once(parts)
        for part in parts:
            self._queue.add(memoryview(part)[sent:] if sent else part)
            sent = max(sent - len(part), 0)

    def send_json(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        """Send a frame of JSON, and before it how much output was skipped until then."""
        self._send_skipped()
        self.send(frame(kind, encode(content)))

    def send_output(self, kind: FrameKind, piece: bytes | memoryview) -> None:
        """Send output. A watcher that is too slow for it skips it."""
        if self.role is ClientRole.WATCH and self.queued > WATCHER_BUFFER:
            self._skipped += len(piece)
            return
        self._send_skipped()
        self.send(HEADER.pack(kind, len(piece)), piece)

    def drop_if_hung_up(self) -> None:
        """If the client has hung up, read the last that it sent, and drop it."""
        if self.is_closed:
            return
        poller = select.poll()
        poller.register(self._sock, 0)  # which asks for POLLHUP only
        for _ in range(_READS_AFTER_HANG_UP if poller.poll(0) else 0):
            if not self.is_closed:
                self._read()

    def read_on(self, on: bool) -> None:
        """Read frames of this client, or stop reading."""
        if not self.is_closed:
            self._loop.on_readable(self._sock.fileno(), self._read if on else None)

    def widen_socket(self) -> None:
        """Let the kernel hold more for this client, so that the shim is woken less often."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)

    def refuse(self, message: str) -> None:
        """Send why, and ignore the client until it closes or its time is over.

        If the shim closed at once, the kernel would discard the message while the client sends.
        """
        self.send_json(FrameKind.REFUSED, {"message": message})
        self.role, self.is_refused, self.waiting_since = None, True, self._loop.now()

    def drop(self) -> None:
        """Close the connection."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.forget(self._sock.fileno())
        self._queue.clear()
        self._sock.close()
        self._clients.remove(self)

    def _send_at_once(self, parts: Sequence[bytes | memoryview]) -> int:
        """Return how many bytes the socket took; `_write` sends the rest when there is room."""
        try:
            sent = self._sock.sendmsg(parts)
        except OSError:
            sent = 0  # `_write` meets the same error and handles it
        if sent < sum(map(len, parts)):
            self._loop.on_writable(self._sock.fileno(), self._write)
        return sent

    def _send_skipped(self) -> None:
        if self._skipped:
            count, self._skipped = self._skipped, 0
            self.send_json(FrameKind.SKIPPED, {"bytes": count})

    def _read(self) -> None:
        try:
            size = self._sock.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.drop()
            return
        self._take(_BUFFER[:size])

    def _take(self, piece: memoryview) -> None:
        """Pass on the frames in `piece`. A client that sends anything else is dropped."""
        try:
            for kind, payload in self._reader.feed(piece):
                if not self.is_closed and not self.is_refused:
                    self._clients.take(self, kind, payload)
        except BadFrame:
            self.drop()
        except Exception as error:  # noqa: BLE001 - the job must not end with one connection
            self.drop()
            self._clients.handler.log_bug(error)

    def _write(self) -> None:
        before = self._queue.size
        try:
            self._queue.write(self._sock.sendmsg)
        except BlockingIOError:
            if self._queue.size < before:
                self.waiting_since = self._loop.now()
            self._loop.on_writable(self._sock.fileno(), self._write)
            return
        except OSError:
            self.drop()
            return
        self._loop.on_writable(self._sock.fileno(), None)


class ShimClients:
    """All connections to one job."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        owner: int,
        daemon: int,
        newest_writes: bool,
        handler: ClientHandler,
    ) -> None:
        """Serve clients of `listener` that run as root or as the uid `owner` or `daemon`."""
        self.loop = loop
        self.attached: ShimClient | None = None
        self._listener = listener
        self._privileged = {0, daemon}
        self._owner = owner
        self._newest_writes = newest_writes
        self.handler = handler
        self._all: list[ShimClient] = []
        self._held: bytearray | None = None
        listener.setblocking(False)
        loop.on_readable(listener.fileno(), self.accept)

    @property
    def has_room(self) -> bool:
        """Whether to read more output: the attached client keeps up, or not much is held."""
        if self.attached is not None:
            return self.attached.queued <= _UNSENT_BUFFER
        return self._held is None or len(self._held) <= _HELD_BUFFER

    @property
    def holds_output(self) -> bool:
        """Whether output is being held for the first client that attaches."""
        return self._held is not None

    def hold_output(self) -> None:
        """Hold output for the first client that attaches."""
        self._held = bytearray()

    def release_output(self) -> bytes | None:
        """Stop holding output, and return what was held; None if nothing was to be held."""
        held, self._held = self._held, None
        return None if held is None else bytes(held)

    def show(self, kind: FrameKind, piece: bytes | memoryview) -> None:
        """Send output to the clients that show it. `piece` may change afterwards."""
        if self._held is not None:
            self._held += HEADER.pack(kind, len(piece))
            self._held += piece
        for client in self._those_of(ClientRole.ATTACH, ClientRole.WATCH):
            client.send_output(kind, piece)

    def send_json(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        """Send a frame of JSON to every client that has said HELLO."""
        for client in self._those_of(*_ROLES.values()):
            client.send_json(kind, content)

    def accept(self) -> None:
        """Accept all connections that wait."""
        while True:
            try:
                sock = socket.socket(fileno=self._listener._accept()[0])  # type: ignore[attr-defined]
            except OSError:
                return
            sock.setblocking(False)
            client = ShimClient(self, sock, peer_credentials(sock).uid)
            self._all.append(client)
            if client.uid != self._owner and client.uid not in self._privileged:
                client.refuse("this job belongs to another user")
            elif self._is_full_for(client):
                client.refuse("too many clients are connected to this job")
                client.drop()
            self._drop_silent()

    def take(self, client: ShimClient, kind: FrameKind, payload: bytes) -> None:
        """Take a frame from a client."""
        if kind == FrameKind.HELLO:
            self._register(client, Payload(payload))
        elif client.role is not None:
            self.handler.handle(client, kind, payload)
        else:
            client.refuse("the first frame must be HELLO")

    def remove(self, client: ShimClient) -> None:
        """Forget a client whose connection was closed."""
        self._all.remove(client)
        if client is self.attached:
            self.attached = None
            self.handler.detach()

    def begin_farewell(self) -> None:
        """Accept the connections that wait, and restart the time that each client has."""
        self.accept()
        for client in self._all:
            client.waiting_since = self.loop.now()

    def all_served(self) -> bool:
        """Return whether every client has what was sent to it; drop those that take nothing."""
        for client in list(self._all):
            is_attached = client.role is ClientRole.ATTACH
            within_s = _ATTACHED_READS_WITHIN_S if is_attached else _WATCHER_READS_WITHIN_S
            if client.queued and client.waiting_since < self.loop.now() - within_s:
                client.drop()
        return not any(
            client.queued or (client.role is None and not client.is_refused) for client in self._all
        )

    def _is_full_for(self, client: ShimClient) -> bool:
        """Return whether there is no place for `client`, after dropping those that hung up."""
        most = MOST_CLIENTS if client.uid in self._privileged else _MOST_OF_USER
        if len(self._all) > most:
            for other in list(self._all):
                if other is not self.attached:  # its input waits until the job has room
                    other.drop_if_hung_up()
        return len(self._all) > most

    def _register(self, client: ShimClient, hello: Payload) -> None:
        role, is_new = _ROLES.get(hello.text("role")), client.role is None
        if role is None:
            raise BadFrame("an unknown role")
        if not is_new and (client.role is not ClientRole.WATCH or role is not ClientRole.ATTACH):
            return  # a second HELLO may only turn a watcher into the attached client
        if role is ClientRole.CONTROL and client.uid not in self._privileged:
            client.refuse(ONLY_THE_DAEMON)
            return
        client.role = self._attach_or_watch(client) if role is ClientRole.ATTACH else role
        if is_new:
            self.handler.welcome(client)
        if client is self.attached:
            client.widen_socket()
            self.handler.attach(client, hello)

    def _attach_or_watch(self, client: ShimClient) -> ClientRole:
        """Make `client` the attached one if it may be, and return its role."""
        former = self.attached
        if former is not None and not self._newest_writes:
            client.send_json(FrameKind.WATCHING, {})
            return ClientRole.WATCH
        self.attached = client
        if former is not None:
            former.role = ClientRole.WATCH
            former.read_on(True)
            former.send_json(FrameKind.WATCHING, {})
        return ClientRole.ATTACH

    def _drop_silent(self) -> None:
        """Drop the clients that have not said HELLO in time, and check the others later."""
        silent = [client for client in self._all if client.role is None]
        for client in silent:
            if client.waiting_since + _HELLO_WITHIN_S <= self.loop.now():
                client.drop()
        if silent:
            self.loop.set_timer_after("hello", _HELLO_WITHIN_S / 2, self._drop_silent)

    def _those_of(self, *roles: ClientRole) -> list[ShimClient]:
        return [client for client in self._all if client.role in roles]


ONLY_THE_DAEMON = "only the daemon may control a job this way"


class Payload:
    """The JSON object in a client's frame."""

    def __init__(self, encoded: bytes) -> None:
        """Read `encoded`.

        Raises:
            BadFrame: it is not a JSON object. Every method raises this for an unusable field.
        """
        try:
            self._content = _object(decode_plain(encoded))
        except (ValueError, RecursionError) as error:
            raise BadFrame("a payload is not JSON") from error

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def text(self, name: str) -> str:
        """Return a field that is a string."""
        value = self._value(name)
        if not isinstance(value, str):
            raise BadFrame(f"{name} is not a string")
        return value

    def integer(self, name: str) -> int:
        """Return a field that is a number, without its fraction."""
        return int(self.number(name))

    def number(self, name: str) -> float:
        """Return a field that is a finite number."""
        value = self._value(name)
        if not isinstance(value, int | float):
            raise BadFrame(f"{name} is not a number")
        try:
            number = float(value)
        except OverflowError as error:
            raise BadFrame(f"{name} is too large") from error
        if not math.isfinite(number):
            raise BadFrame(f"{name} is not finite")
        return number

    def is_null(self, name: str) -> bool:
        """Return whether a field is there and null."""
        return self._value(name) is None

    def inner(self, name: str) -> Payload:
        """Return a field that is an object."""
        inner = Payload.__new__(Payload)
        inner._content = _object(self._value(name))
        return inner

    def _value(self, name: str) -> Any:
        try:
            return self._content[name]
        except KeyError:
            raise BadFrame(f"{name} is missing") from None


def _object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise BadFrame("a payload is not an object")
    return content
