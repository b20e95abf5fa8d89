"""Who is at the other end of a connection: what the kernel says, never what they write.

Who may do what: a table of routes is held against the caller that the kernel names.
"""

import asyncio
import ctypes
import grp
import socket
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from errno import ERANGE
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gpulease.domain.job import Job
from gpulease.errors import GpuleaseError, NotAllowed, TooLarge
from gpulease.peer_credentials import peer_credentials
from gpulease.units import format_size
from gpulease.wire.views import ErrorBody, ErrorReply

_SO_PEERGROUPS = 59
"""Of asm-generic/socket.h; Python does not name it."""
_GID_BYTES = 4
_MOST_GROUPS = 65536
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that opened the connection: its ids at that moment (SO_PEERCRED, unix(7))."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] | None = None
    """Its supplementary groups; None where the kernel does not say."""


def caller_of(connection: socket.socket) -> Caller:
    """Ask the kernel who is at the other end of a connected Unix socket."""
    return Caller(*peer_credentials(connection), _groups_of(connection))


def _groups_of(connection: socket.socket) -> tuple[int, ...] | None:
    """Return the supplementary groups at the other end; None on kernels before 4.13."""
    # By hand, since Python's getsockopt() has no room for more than 256 groups.
    room = 64
    while room <= _MOST_GROUPS:
        found = (ctypes.c_uint32 * room)()
        size = ctypes.c_uint32(ctypes.sizeof(found))
        asked = (connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS)
        if _libc.getsockopt(*asked, found, ctypes.byref(size)) == 0:
            return tuple(found[: size.value // _GID_BYTES])
        if ctypes.get_errno() != ERANGE:
            return None
        # The kernel said how much it takes.
        room = max(2 * room, size.value // _GID_BYTES)
    return None


_LARGEST_HEAD = 64 * 1024
"""Bytes of a request's line and headers."""
_HEAD_WITHIN_S = 10.0
MOST_CONNECTIONS = 1000
"""Of one user at once; every `run` that waits holds one. Root has no such limit."""


class Pipelined(Exception):
    """A second request came before the first was answered; httptools makes it a refusal."""


class HeadTooLarge(Exception):
    """A request's line and headers are over the bound; httptools makes it a refusal."""


def plain_answer(error: GpuleaseError, phrase: str) -> bytes:
    """Return a whole HTTP answer that says an error, for whoever never gets to a handler."""
    body = msgspec.json.encode(ErrorReply(ErrorBody(error.code, error.message, error.hint)))
    head = (
        f"HTTP/1.1 {error.http_status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with the caller in each request's state, and with bounds.

    Until a request's headers are complete nobody has been identified to any handler, so what one
    user can make the daemon hold by then is bounded here.
    """

    most_connections: ClassVar[int] = MOST_CONNECTIONS
    _connections: ClassVar[Counter[int]] = Counter()

    @classmethod
    def has_room_for(cls, uid: int, coming: int) -> bool:
        """Tell whether a user may have one more connection, where so many more are coming."""
        return uid == 0 or cls._connections[uid] + coming < cls.most_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        caller = caller_of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "caller": caller, "abort": transport.abort}
        self._uid = caller.uid
        self._unparsed: int | None = 0
        """Bytes that came of a head which is not complete; None between its end and the next."""
        self._head_size = 0
        """Bytes of the head so far as it is parsed, which may all have come at once."""
        self._deadline = self.loop.call_later(_HEAD_WITHIN_S, self._waited_enough)
        self._connections[self._uid] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._connections[self._uid] -= 1
        if not self._connections[self._uid]:
            del self._connections[self._uid]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._unparsed is None or self.transport.is_closing():
            return
        self._unparsed += len(data)
        if self._unparsed > _LARGEST_HEAD:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self._head_size > _LARGEST_HEAD:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        error = TooLarge(
            "cannot take this request: its line and headers are larger than "
            f"{format_size(_LARGEST_HEAD)}",
            "what is large belongs into the body",
        )
        self.transport.write(plain_answer(error, "Content Too Large"))
        self.transport.close()

    def on_message_begin(self) -> None:
        # Nobody we know does it, and one connection could queue requests without bound.
        if self._is_busy:
            raise Pipelined
        self._unparsed = self._head_size = 0
        self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEAD_WITHIN_S, self._waited_enough)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _LARGEST_HEAD:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._unparsed = None
        self._deadline.cancel()
        super().on_headers_complete()

    @property
    def _is_busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _waited_enough(self) -> None:
        self.transport.abort()


def caller_in(scope: dict[str, Any]) -> Caller:
    """Return the caller of a request, as `PeerProtocol` left it in the ASGI scope."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class Who(Enum):
    """Who may use a route."""

    ANYONE = auto()
    """Every local user."""
    SUBMITTER = auto()
    """The users as whom the daemon can run jobs: all where it is root's, else its own user."""
    MANAGER = auto()
    """The job's owner, and the admins: they may act on it, and see what it runs."""
    OWNER = auto()
    """The job's owner: what it printed and its environment may hold secrets."""
    ADMIN = auto()
    """The admins alone: it concerns everyone."""


ABOUT_A_JOB = frozenset({Who.MANAGER, Who.OWNER})


@dataclass(frozen=True, slots=True)
class Rights:
    """Who is more than a user here: root, whose daemon it is, and a group of admins."""

    daemon_uid: int
    admins: str | None = None
    """The name of the group; a daemon of one user has none."""
    hide_commands: bool = False
    """Whether what a job runs is for its managers alone."""

    def is_master(self, caller: Caller) -> bool:
        """Tell whether `caller` could do everything anyway."""
        return caller.uid in (0, self.daemon_uid)

    def is_admin(self, caller: Caller) -> bool:
        """Tell whether `caller` may act on everyone's jobs."""
        return self.is_master(caller) or self._admins_gid() in (caller.gid, *(caller.groups or ()))

    def hides_from(self, caller: Caller) -> bool:
        """Tell whether what others run is hidden from `caller`."""
        return self.hide_commands and not self.is_admin(caller)

    def has(self, who: Who, caller: Caller, job: Job) -> bool:
        """Tell whether `caller` may do with `job` what is open to MANAGER or OWNER."""
        above = self.is_master(caller) if who is Who.OWNER else self.is_admin(caller)
        return caller.uid == job.owner.uid or above

    def check(self, who: Who, caller: Caller, verb: str, job: Job | None = None) -> None:
        """Check that `caller` is among `who` and so may do `verb`, with `job` if it is about one.

        Raises:
            NotAllowed: they may not.
        """
        match who:
            case Who.ANYONE:
                return
            case Who.SUBMITTER:
                self._check_submitter(caller)
            case Who.MANAGER | Who.OWNER:
                assert job is not None, "the router finds the job"
                self._check_job(who, caller, verb, job)
            case Who.ADMIN:
                self._check_admin(caller, verb)

    def _check_submitter(self, caller: Caller) -> None:
        # Only root's daemon can become another user.
        if self.daemon_uid not in (0, caller.uid):
            raise NotAllowed(
                "cannot submit: this daemon belongs to another user and runs jobs as them alone",
                "unset GPULEASE_SOCKET to use the system's daemon, or one of your own",
            )

    def _check_job(self, who: Who, caller: Caller, verb: str, job: Job) -> None:
        if not self.has(who, caller, job):
            raise NotAllowed(
                f"cannot {verb} job {job.id}: it belongs to {job.owner.user}",
                "only its owner and root may"
                if who is Who.OWNER
                else "only its owner, the machine's admins and root may",
            )

    def _check_admin(self, caller: Caller, verb: str) -> None:
        if self.is_admin(caller):
            return
        group = f"members of the group {self.admins}" if self.admins else "whose daemon it is"
        raise NotAllowed(
            f"cannot {verb}: that is for the admins of this machine", f"root and {group} may"
        )

    def _admins_gid(self) -> int | None:
        # Looked up each time, since a group may be made or made anew while the daemon runs.
        try:
            return grp.getgrnam(self.admins).gr_gid if self.admins else None
        except KeyError:
            return None
