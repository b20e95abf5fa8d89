"""Lets callers in: users by turns, none with more connections than one user may have.

Setting up a connection costs twenty times what it costs to take one from the kernel's line. So the
line is emptied first, whoever has too many is told so and sent away, and the others come in one
user after the other: a thousand callers of one user do not stand before those of another.

The daemon's door: its socket, where callers look for it for as long as the daemon lives.

A socket can be taken away under a daemon: logind removes /run/user/UID when its user has logged
out, and anybody may tidy up too much. Nobody finds the daemon then, and no other may take its
place.

The socket on which the daemon listens.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from gpulease.errors import BadConfiguration, TooMany
from gpulease.path_ownership import make_directories, shaky
from gpulease.peer_credentials import peer_credentials
from gpulease.server.auth import PeerProtocol, plain_answer
from gpulease.service.log_once import LogOnce

_log = logging.getLogger(__name__)

BACKLOG = 4096
"""Who may stand before the door; the kernel's usual most. When it is full, chance alone decides who
gets a place, and whoever tries most often is luckiest."""
_TAKEN_AT_ONCE = 256
_LET_IN_AT_ONCE = 4
"""Between two looks at what else there is to do."""
_TRY_AGAIN_AFTER_S = 1.0


class ConnectionLimits:
    """Serves those who connect to a listening socket."""

    def __init__(self, listening: socket.socket, protocol: Callable[[], PeerProtocol]) -> None:
        """Begin to take callers in; the socket is closed with this."""
        self._listening = listening
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, deque[socket.socket]] = {}
        """By uid; first the one whose turn it is."""
        self._coming_in: dict[asyncio.Task[object], int] = {}
        """By uid: those for whom a connection is being set up, and is not counted yet."""
        self._open = True
        self._complaints = LogOnce(_log)
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Take in nobody more; those who wait are let go."""
        self._open = False
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        for line in self._waiting.values():
            for link in line:
                link.close()
        self._waiting = {}

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._listening.fileno(), self._take)

    def _take(self) -> None:
        """Take callers from the kernel's line."""
        nobody_waited = not self._waiting
        for _ in range(_TAKEN_AT_ONCE):
            try:
                link = self._listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                # For want of descriptors, say: the line stays, and so would the event.
                text = f"cannot take in callers at this moment: {error}"
                self._complaints.say("accept", text, level=logging.ERROR)
                self._loop.remove_reader(self._listening.fileno())
                self._loop.call_later(_TRY_AGAIN_AFTER_S, self._resume)
                break
            self._complaints.passed("accept")
            self._line_up(link)
        if nobody_waited and self._waiting:
            self._loop.call_soon(self._let_in)

    def _line_up(self, link: socket.socket) -> None:
        uid = peer_credentials(link).uid
        coming = len(self._waiting.get(uid, ())) + list(self._coming_in.values()).count(uid)
        if PeerProtocol.has_room_for(uid, coming):
            link.setblocking(False)
            self._waiting.setdefault(uid, deque()).append(link)
            return
        with link, contextlib.suppress(OSError):
            link.send(_turned_away(PeerProtocol.most_connections), socket.MSG_DONTWAIT)

    def _let_in(self) -> None:
        """Let some in, users by turns, and go on in a moment with the others."""
        for _ in range(_LET_IN_AT_ONCE):
            if not self._waiting:
                return
            uid = next(iter(self._waiting))
            line = self._waiting.pop(uid)
            link = line.popleft()
            if line:
                self._waiting[uid] = line
            if _has_left(link):
                link.close()
                continue
            coming = self._loop.connect_accepted_socket(self._protocol, link)
            task: asyncio.Task[object] = self._loop.create_task(coming)
            self._coming_in[task] = uid
            task.add_done_callback(self._coming_in.pop)
        if self._waiting:
            self._loop.call_soon(self._let_in)


def _has_left(link: socket.socket) -> bool:
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@cache
def _turned_away(most: int) -> bytes:
    error = TooMany(
        f"cannot reach the daemon: you have {most} connections open, the most for one user",
        "ask again when some of your commands have ended; jobs go on meanwhile",
    )
    return plain_answer(error, "Too Many Requests")


_LONGEST_PATH = 107
"""Bytes of a Unix socket's path, see unix(7); one more is its final NUL."""


def listen(path: Path, *, to_all: bool) -> socket.socket:
    """Return a socket that listens at `path`; every local user may connect if `to_all`.

    Raises:
        BadConfiguration: the path cannot be used, or another daemon listens there.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise BadConfiguration(
            f"cannot listen on {path}: the path is {len(os.fsencode(path))} bytes long, "
            f"and a socket's is at most {_LONGEST_PATH}",
            "give a shorter one with --socket, such as /run/gpulease/gpuleased.sock",
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_parent(path, to_all=to_all)
        _remove_stale(path)
        listening.bind(str(path))
        path.chmod(0o666 if to_all else 0o600)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise BadConfiguration(
            f"cannot listen on {path}: {error.strerror or error}",
            "give a path in a directory that this user can write with --socket",
        ) from error
    except BadConfiguration:
        listening.close()
        raise
    return listening


def _make_parent(path: Path, *, to_all: bool) -> None:
    parent = path.parent
    if not (to_all and shaky(parent, os.geteuid())):
        make_directories(parent, 0o755 if to_all else 0o700)
    # Root could listen in anybody's place anyway: a user's socket may lie in /tmp itself.
    is_roots = not to_all and parent.lstat().st_uid == parent.stat().st_uid == 0
    if not is_roots and (why := shaky(parent, os.geteuid())):
        raise BadConfiguration(
            f"cannot listen on {path}: {why}",
            "whoever may write there could listen in our place: give another path with --socket",
        )


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on any more; nothing else is ever removed."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise FileExistsError(errno.EEXIST, "a file that is no socket is there")
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
        f"cannot listen on {path}: another daemon does",
        "stop it first, or give another path with --socket",
    )


class SocketGuard:
    """The listening socket at one path, laid anew when it is gone."""

    def __init__(
        self, path: Path, *, to_all: bool, move: Callable[[socket.socket], Awaitable[None]]
    ) -> None:
        """`move` makes a new listening socket the one that is served."""
        self._path = path
        self._to_all = to_all
        self._move = move
        self._laid: tuple[int, int] | None = None
        self._complaints = LogOnce(_log)

    def open(self) -> socket.socket:
        """Return the socket to listen on.

        Raises:
            BadConfiguration: the path cannot be used, or another daemon listens there.
        """
        listening = listen(self._path, to_all=self._to_all)
        self._laid = self._found()
        return listening

    async def look(self) -> None:
        """Lay the socket anew if it is gone or is another file; why it cannot be is told once."""
        if self._is_ours():
            return
        try:
            listening = self.open()
        except BadConfiguration as error:
            self._complaints.say(
                "socket", f"the socket has gone, and {error.message}; trying again"
            )
            return
        self._complaints.passed("socket")
        await self._move(listening)
        _log.warning("the socket had gone; listening anew on %s", self._path)

    def close(self) -> None:
        """Take the socket away, unless what lies there is not ours."""
        if self._is_ours():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _is_ours(self) -> bool:
        return self._laid is not None and self._found() == self._laid

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino
