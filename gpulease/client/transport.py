"""HTTP over a Unix socket, one connection for each request; wire objects to and from JSON."""

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
    AdoptRequest,
    HoldRequest,
    NestedRequest,
    SubmitRequest,
)


class Connection(HTTPConnection):
    """HTTP to the socket at `path`, if one of the `trusted` users listens there."""

    def __init__(self, path: Path, timeout: float, trusted: frozenset[int] | None) -> None:
        super().__init__("gpulease", timeout=timeout)
        self._path = path
        self._trusted = trusted

    def connect(self) -> None:
        self.sock = dial(self._path, self.timeout)
        if self._trusted is not None and (uid := peer_uid(self.sock)) not in self._trusted:
            raise not_trusted(self._path, uid)


class Reply:
    """A response and its connection, which are closed together."""

    def __init__(self, connection: Connection, response: HTTPResponse, link: socket.socket) -> None:
        self._connection = connection
        self._link = link
        self.response = response

    def settimeout(self, seconds: float | None) -> None:
        self._link.settimeout(seconds)

    def read(self, path: Path) -> bytes:
        try:
            return self.response.read()
        except (OSError, HTTPException) as error:
            raise lost(path) from error

    def raise_errors(self, path: Path) -> None:
        if not 200 <= self.response.status < 300:
            raise error_of(self.response.status, self.read(path), path)

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def lines(reply: Reply, path: Path) -> Iterator[bytes]:
    """Yield each line without its end; an empty line is a keep-alive."""
    try:
        while line := reply.response.readline():
            yield line.strip()
    except (OSError, HTTPException) as error:
        raise lost(path) from error


_BACK_WITHIN = 10.0
"""Seconds for a daemon to restart after a lost answer; it takes two."""
_TRY_EVERY = 0.3
LONGEST_SILENCE = 120.0
"""Seconds without a keep-alive after which a stream counts as lost."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The daemon on one socket. Every method raises `NoDaemon`, or the error in the reply."""

    path: Path
    trusted: frozenset[int] | None
    """The users that may listen there; None: any."""
    answer_within: float
    """Timeout of an answer in seconds."""

    def submit(self, path: str, request: SubmitRequest | HoldRequest | AdoptRequest) -> bytes:
        """Post a submission under a key, and again if the answer is lost.

        Raises:
            AnswerLost: it may be queued, and no daemon answers.
            TooLarge: the request exceeds what the daemon reads.
        """
        if request.key is None:
            request = replace(request, key=os.urandom(16).hex())
        try:
            return self.post_until_answered(path, body_of(request))
        except AnswerLost as doubt:
            raise AnswerLost(
                f"{doubt.message}; the daemon may have queued the job",
                "when the daemon is back, gpulease list shows it",
            ) from doubt

    def post_until_answered(self, path: str, body: bytes) -> bytes:
        """Post a request that may be repeated, and again if the answer is lost.

        The request contains an environment, so it is sent to daemons of root and the caller only,
        even on a socket that the user has named.

        Raises:
            AnswerLost: the request was sent, and the daemon does not come back.
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
                    raise  # it was never sent
                doubt = AnswerLost(error.message, error.hint)
            until = until or time.monotonic() + _BACK_WITHIN
            if time.monotonic() > until:
                raise doubt
            time.sleep(_TRY_EVERY)

    def _limited(self, until: float | None) -> "Transport":
        """Return this transport with a timeout of at most what is left `until` then."""
        if until is None:
            return self
        left = max(_TRY_EVERY, until - time.monotonic())
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
            return reply.read(self.path)

    def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
        timeout: float = LONGEST_SILENCE,
    ) -> Reply:
        """Return the reply to a request as soon as its head is there; the caller closes it.

        None in `query` is left out. `timeout` is in seconds without data.
        """
        connection = Connection(self.path, timeout, self.trusted)
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        target = API_PREFIX + path + (f"?{urlencode(asked)}" if asked else "")
        headers = {"User-Agent": f"gpulease/{__version__}", "Content-Type": "application/json"}
        failed: Callable[[Path, Exception], NoDaemon] = no_daemon
        try:
            connection.connect()
            failed = answer_lost
            # A daemon that refuses the connection answers without reading the request.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body=body, headers=headers)
            link = connection.sock  # http.client drops its reference when the server closes
            reply = Reply(connection, connection.getresponse(), link)
            reply.raise_errors(self.path)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | HTTPException):
                raise failed(self.path, error) from error
            raise
        return reply


def body_of(
    request: SubmitRequest | HoldRequest | AdoptRequest | NestedRequest,
) -> bytes:
    """Return a request with an environment as JSON.

    Raises:
        TooLarge: it exceeds what the daemon reads.
    """
    body = msgspec.json.encode(request)
    if len(body) > LARGEST_REQUEST:
        raise TooLarge(
            f"cannot submit: arguments and environment make a request of {format_size(len(body))}, "
            f"and the daemon reads at most {format_size(LARGEST_REQUEST)}",
            "pass large values in a file",
        )
    return body


View = TypeVar("View")


def decode(kind: type[View], body: bytes) -> View:
    """Return the wire object in a reply; unknown fields are ignored.

    Raises:
        GpuleaseError: the daemon and this command are of incompatible versions.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise GpuleaseError(
            f"cannot read the daemon's answer: {error}",
            "after an upgrade, restart the daemon; running jobs continue",
        ) from error


def encode(view: object) -> bytes:
    """Return a wire object as the JSON that the daemon would send."""
    return msgspec.json.encode(view)


def indent(body: bytes) -> str:
    """Return JSON indented for people.

    Characters that a terminal would interpret are escaped: the text may come from another user.
    """
    text = msgspec.json.format(body, indent=2).decode()
    if text.isascii() and "\x7f" not in text:
        return text  # JSON itself holds no other control characters
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
