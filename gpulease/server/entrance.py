"""Lets callers in: users by turns, none with more connections than one user may have.

Setting up a connection costs twenty times what it costs to take one from the kernel's line. So the
line is emptied first, whoever has too many is told so and sent away, and the others come in one
user after the other: a thousand callers of one user do not stand before those of another.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import cache

from gpulease.errors import TooMany
from gpulease.server.peer import PeerProtocol, plain_answer
from gpulease.service.complaints import Complaints

_log = logging.getLogger(__name__)

BACKLOG = 4096
"""Who may stand before the door; the kernel's usual most. When it is full, chance alone decides who
gets a place, and whoever tries most often is luckiest."""
_TAKEN_AT_ONCE = 256
_LET_IN_AT_ONCE = 4
"""Between two looks at what else there is to do."""
_TRY_AGAIN_AFTER_S = 1.0
_UCRED = struct.Struct("iII")


class Entrance:
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
        self._complaints = Complaints(_log)
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
        uid = _uid_of(link)
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


def _uid_of(link: socket.socket) -> int:
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(packed)[1])


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
