"""Requests to the daemon and its replies, one connection each; what is ordered is ordered once.

HTTP over a Unix socket: a connection for each request, and the reply that comes on it.

Wire objects from JSON and back.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from gpulease import __version__
from gpulease.client.errors import AnswerLost, answer_lost, error_of, lost, no_daemon, not_trusted
from gpulease.client.unix_socket import dial, peer_uid, trusted_users
from gpulease.errors import GpuleaseError, NoDaemon, TooLarge
from gpulease.units import format_size
from gpulease.wire.requests import (
    API_PREFIX,
    LARGEST_REQUEST,
    HoldRequest,
    NestedRequest,
    SubmitRequest,
)


class Connection(HTTPConnection):
    """HTTP to the socket at `path`, and to nobody but `trusted` users."""

    def __init__(self, path: Path, timeout: float, trusted: frozenset[int] | None) -> None:
        super().__init__("gpulease", timeout=timeout)
        self._path = path
        self._trusted = trusted

    def connect(self) -> None:
        self.sock = dial(self._path, self.timeout)
        if self._trusted is not None and (uid := peer_uid(self.sock)) not in self._trusted:
            raise not_trusted(self._path, uid)


class Reply:
    """A response and the connection that it comes on, which close together."""

    def __init__(self, connection: Connection, response: HTTPResponse, link: socket.socket) -> None:
        self._connection = connection
        self._link = link
        self.response = response

    def settimeout(self, seconds: float | None) -> None:
        self._link.settimeout(seconds)

    def whole(self, path: Path) -> bytes:
        try:
            return self.response.read()
        except (OSError, HTTPException) as error:
            raise lost(path) from error

    def refuse_errors(self, path: Path) -> None:
        if not 200 <= self.response.status < 300:
            raise error_of(self.response.status, self.whole(path), path)

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def lines(reply: Reply, path: Path) -> Iterator[bytes]:
    """Yield each line without its end; an empty one is a keep-alive."""
    try:
        while line := reply.response.readline():
            yield line.strip()
    except (OSError, HTTPException) as error:
        raise lost(path) from error


_BACK_WITHIN = 10.0
"""Seconds in which a daemon that was lost while it was asked may come back; a restart takes two."""
_TRIED_EVERY = 0.3
SILENT_FOR_AT_MOST = 120.0
"""Seconds without even a keep-alive after which a stream counts as lost."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The daemon on one socket. Every method raises `NoDaemon`, or the error that it replied."""

    path: Path
    trusted: frozenset[int] | None
    """The users who may be listening; None is anyone at all."""
    answer_within: float
    """Seconds that an answer may take."""

    def order(self, path: str, request: SubmitRequest | HoldRequest) -> bytes:
        """Post a request that makes something, under a key, and again where its answer was lost.

        Raises:
            AnswerLost: it may have been made, and nobody is there to tell.
            TooLarge: the request is over what the daemon reads.
        """
        if request.key is None:
            request = replace(request, key=os.urandom(16).hex())
        try:
            return self.insist(path, body_of(request))
        except AnswerLost as doubt:
            raise AnswerLost(
                f"{doubt.message}; it had been asked for the lease, and may have queued it",
                "gpulease list tells, once the daemon is back",
            ) from doubt

    def insist(self, path: str, body: bytes) -> bytes:
        """Post a request that may be repeated, and again where its answer was lost.

        It holds an environment, and only a daemon of root or of the caller can run it: it is sent
        to no other, whatever socket was named.

        Raises:
            AnswerLost: the daemon was asked, and does not come back.
        """
        careful = replace(self, trusted=self.trusted or trusted_users())
        until: float | None = None
        while True:
            try:
                return careful._limited(until).ask("POST", path, body=body)
            except AnswerLost as error:
                doubt = error
            except NoDaemon as error:
                if until is None:
                    raise  # it was never asked
                doubt = AnswerLost(error.message, error.hint)
            until = until or time.monotonic() + _BACK_WITHIN
            if time.monotonic() > until:
                raise doubt
            time.sleep(_TRIED_EVERY)

    def _limited(self, until: float | None) -> "Transport":
        """Return this exchange with no more patience for an answer than is left `until` then."""
        if until is None:
            return self
        left = max(_TRIED_EVERY, until - time.monotonic())
        return replace(self, answer_within=min(left, self.answer_within))

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        """Return the whole reply to a request."""
        with closing(self.open(method, path, query, body, self.answer_within)) as reply:
            return reply.whole(self.path)

    def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
        timeout: float = SILENT_FOR_AT_MOST,
    ) -> Reply:
        """Return the reply to a request when its head is there; the caller closes it.

        Of `query`, what is None is left out. `timeout` is in seconds, of silence.
        """
        connection = Connection(self.path, timeout, self.trusted)
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        target = API_PREFIX + path + (f"?{urlencode(asked)}" if asked else "")
        headers = {"User-Agent": f"gpulease/{__version__}", "Content-Type": "application/json"}
        failed: Callable[[Path, Exception], NoDaemon] = no_daemon
        try:
            connection.connect()
            failed = answer_lost
            # Who is turned away at once is told why, although nobody reads what they ask.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body=body, headers=headers)
            link = connection.sock  # http.client forgets it once the reply is the last on it
            reply = Reply(connection, connection.getresponse(), link)
            reply.refuse_errors(self.path)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | HTTPException):
                raise failed(self.path, error) from error
            raise
        return reply


def body_of(
    request: SubmitRequest | HoldRequest | NestedRequest,
) -> bytes:
    """Return a request with an environment as JSON.

    Raises:
        TooLarge: it is over what the daemon reads.
    """
    body = msgspec.json.encode(request)
    if len(body) > LARGEST_REQUEST:
        raise TooLarge(
            f"cannot submit the job: its arguments and environment make a request of "
            f"{format_size(len(body))}, and the daemon reads {format_size(LARGEST_REQUEST)}",
            "pass large values in a file",
        )
    return body


View = TypeVar("View")


def decode(kind: type[View], body: bytes) -> View:
    """Read a reply; members that this version does not know are passed over.

    Raises:
        GpuleaseError: the daemon and this command do not speak the same version.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise GpuleaseError(
            f"cannot read the daemon's answer: {error}",
            "after an upgrade, restart the daemon; running jobs go on",
        ) from error


def encode(view: object) -> bytes:
    """Write a wire object as the JSON that the daemon would send."""
    return msgspec.json.encode(view)


def indent(body: bytes) -> str:
    """Return JSON laid out for people, with every member in its place.

    What a terminal would obey is written as JSON can write any character: it may be a stranger's.
    """
    text = msgspec.json.format(body, indent=2).decode()
    if text.isascii() and "\x7f" not in text:
        return text  # JSON itself holds no other control characters
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
