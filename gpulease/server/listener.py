"""The socket on which the daemon listens, and the connections that it accepts.

A user with too many connections gets an error. A connection costs little until it sends its first
byte. Those that have sent one are set up in turn by user, so that a thousand connections of one
user do not delay another user.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

import msgspec

from gpulease.errors import BadConfiguration, GpuleaseError, TooMany
from gpulease.path_ownership import make_directories, shaky
from gpulease.peer_credentials import peer_credentials
from gpulease.service.log_once import LogOnce
from gpulease.wire.requests import ErrorBody, ErrorReply

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 1000
"""Of one user at once; each `run` that waits holds one. Root has no such limit."""
HEAD_WITHIN_S = 10.0
"""Time for the line and the headers of a request."""
_BACKLOG = 1024
"""A connection waits behind so many in the kernel. When the queue is full, connect() waits too, and
fails in programs that do not let it wait."""
_ACCEPT_AT_ONCE = 64
"""Before other events are handled; refusing one takes about ten microseconds."""
_SET_UP_AT_ONCE = 4
"""Before other events are handled; each takes twenty times as long as accepting it."""
_TRY_AGAIN_AFTER_S = 1.0


class ConnectionCounts:
    """How many connections each user has open."""

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self.most = most
        self.refused = 0
        """Connections of users who had too many."""
        self.failed = 0
        """Errors in accepting connections."""
        self._open: Counter[int] = Counter()

    @property
    def open(self) -> int:
        """The number of open connections."""
        return self._open.total()

    def has_room_for(self, uid: int) -> bool:
        """Tell whether a user may open another connection."""
        return uid == 0 or self._open[uid] < self.most

    def add(self, uid: int) -> None:
        self._open[uid] += 1

    def remove(self, uid: int) -> None:
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]


class Acceptor:
    """Accepts connections on a listening socket and sets them up, users in turn.

    It adds each to `counts`; what `protocol` returns removes it at the end of the connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        counts: ConnectionCounts,
    ) -> None:
        """Start; the listening socket is closed by `close`."""
        self._listening = listening
        self._protocol = protocol
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._silent: dict[socket.socket, tuple[int, asyncio.TimerHandle]] = {}
        """Connections without a first byte: the uid, and when they are closed."""
        self._ready: dict[int, deque[socket.socket]] = {}
        """Connections with a first byte by uid, the next user first."""
        self._in_setup: set[asyncio.Task[object]] = set()
        self._is_open = True
        self._complaints = LogOnce(_log)
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and close the connections that are not set up."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        for connection in tuple(self._silent):
            self._drop(connection, self._heard(connection))
        for uid, connections in self._ready.items():
            for connection in connections:
                self._drop(connection, uid)
        self._ready = {}

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        """Accept what is in the kernel's queue, up to a limit."""
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection = self._listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                # Such as too many open files: the queue stays full, and the event would repeat.
                self._counts.failed += 1
                text = f"cannot accept connections at the moment: {error}"
                self._complaints.say("accept", text, level=logging.ERROR)
                self._loop.remove_reader(self._listening.fileno())
                self._loop.call_later(_TRY_AGAIN_AFTER_S, self._resume)
                break
            self._complaints.passed("accept")
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Wait for the first byte of a connection; refuse it if its user has too many."""
        uid = peer_credentials(connection).uid
        if not self._counts.has_room_for(uid):
            self._counts.refused += 1
            with connection, contextlib.suppress(OSError):
                connection.send(_too_many(self._counts.most), socket.MSG_DONTWAIT)
            return
        self._counts.add(uid)
        connection.setblocking(False)
        late = self._loop.call_later(HEAD_WITHIN_S, self._give_up, connection)
        self._silent[connection] = uid, late
        self._loop.add_reader(connection, self._begin, connection)

    def _heard(self, connection: socket.socket) -> int:
        """Stop waiting for a first byte; return the uid."""
        uid, late = self._silent.pop(connection)
        late.cancel()
        self._loop.remove_reader(connection)
        return uid

    def _give_up(self, connection: socket.socket) -> None:
        self._drop(connection, self._heard(connection))

    def _drop(self, connection: socket.socket, uid: int) -> None:
        connection.close()
        self._counts.remove(uid)

    def _begin(self, connection: socket.socket) -> None:
        """Set up a connection that has sent a byte, when it is the turn of its user."""
        uid = self._heard(connection)
        if _is_closed(connection):
            self._drop(connection, uid)
            return
        if not self._ready:
            self._loop.call_soon(self._set_up)
        self._ready.setdefault(uid, deque()).append(connection)

    def _set_up(self) -> None:
        """Set up some connections, one user after the other, and the rest in the next ticks."""
        for _ in range(_SET_UP_AT_ONCE):
            if not self._ready:
                return
            uid = next(iter(self._ready))
            connections = self._ready.pop(uid)
            task: asyncio.Task[object] = self._loop.create_task(
                self._loop.connect_accepted_socket(self._protocol, connections.popleft())
            )
            self._in_setup.add(task)
            task.add_done_callback(self._in_setup.discard)
            if connections:
                self._ready[uid] = connections
        if self._ready:
            self._loop.call_soon(self._set_up)


def _is_closed(connection: socket.socket) -> bool:
    """Tell whether the caller has closed its end without a request."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@cache
def _too_many(most: int) -> bytes:
    error = TooMany(
        f"cannot reach the daemon: you have {most} connections open, the most for one user",
        "try again when some of your commands have ended; your jobs continue",
    )
    return raw_response(error, "Too Many Requests")


def raw_response(error: GpuleaseError, phrase: str) -> bytes:
    """Return a complete HTTP response for an error that no handler answers."""
    body = msgspec.json.encode(ErrorReply(ErrorBody(error.code, error.message, error.hint)))
    head = (
        f"HTTP/1.1 {error.http_status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_LONGEST_PATH = 107
"""Bytes of a Unix socket's path, see unix(7); one more is its final NUL."""


def listen(path: Path, *, to_all: bool) -> socket.socket:
    """Return a socket that listens at `path`; with `to_all` every local user may connect.

    Raises:
        BadConfiguration: the path cannot be used, or another daemon listens there.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise BadConfiguration(
            f"cannot listen on {path}: the path is {len(os.fsencode(path))} bytes long, "
            f"and a socket's is at most {_LONGEST_PATH}",
            "pass a shorter one with --socket, such as /run/gpulease/gpuleased.sock",
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_parent(path, to_all=to_all)
        _remove_stale(path)
        listening.bind(str(path))
        path.chmod(0o666 if to_all else 0o600)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise BadConfiguration(
            f"cannot listen on {path}: {error.strerror or error}",
            "pass a path in a directory that this user can write with --socket",
        ) from error
    except BadConfiguration:
        listening.close()
        raise
    return listening


def _make_parent(path: Path, *, to_all: bool) -> None:
    parent = path.parent
    if not (to_all and shaky(parent, os.geteuid())):
        make_directories(parent, 0o755 if to_all else 0o700)
    # A user's socket may be in /tmp itself: root could replace it wherever it is.
    is_roots = not to_all and parent.lstat().st_uid == parent.stat().st_uid == 0
    if not is_roots and (why := shaky(parent, os.geteuid())):
        raise BadConfiguration(
            f"cannot listen on {path}: {why}",
            "another user could replace the socket there: pass another path with --socket",
        )


def _remove_stale(path: Path) -> None:
    """Remove a socket on which no process listens; refuse anything else."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise FileExistsError(errno.EEXIST, "there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass
    raise BadConfiguration(
        f"cannot listen on {path}: another daemon listens there",
        "stop it first, or pass another path with --socket",
    )


class SocketGuard:
    """The listening socket at one path, created again when it disappears.

    logind removes /run/user/UID when the user logs out, and cleanup scripts remove too much. No
    client would find the daemon then, and no other daemon could start.
    """

    def __init__(
        self, path: Path, *, to_all: bool, move: Callable[[socket.socket], Awaitable[None]]
    ) -> None:
        """`move` makes the server accept connections on another listening socket."""
        self._path = path
        self._to_all = to_all
        self._move = move
        self._created: tuple[int, int] | None = None
        self._complaints = LogOnce(_log)

    def open(self) -> socket.socket:
        """Return the socket to listen on.

        Raises:
            BadConfiguration: the path cannot be used, or another daemon listens there.
        """
        listening = listen(self._path, to_all=self._to_all)
        self._created = self._file()
        return listening

    async def look(self) -> None:
        """Create the socket again if it is gone or replaced; a failure is logged once."""
        if self._is_ours():
            return
        try:
            listening = self.open()
        except BadConfiguration as error:
            self._complaints.say("socket", f"the socket is gone: {error.message}; trying again")
            return
        self._complaints.passed("socket")
        await self._move(listening)
        _log.warning("the socket was gone; listening again on %s", self._path)

    def close(self) -> None:
        """Remove the socket, unless the file at its path is not ours."""
        if self._is_ours():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _is_ours(self) -> bool:
        return self._created is not None and self._file() == self._created

    def _file(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino
