"""Requests to the daemon and its replies, one connection each; what is ordered is ordered once."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from gpulease import __version__, wire
from gpulease.client.dial import trusted_users
from gpulease.client.failures import AnswerLost, answer_lost, no_daemon
from gpulease.client.http import Connection, Reply
from gpulease.errors import NoDaemon, TooLarge
from gpulease.units import format_size

_BACK_WITHIN = 10.0
"""Seconds in which a daemon that was lost while it was asked may come back; a restart takes two."""
_TRIED_EVERY = 0.3
SILENT_FOR_AT_MOST = 120.0
"""Seconds without even a keep-alive after which a stream counts as lost."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The daemon on one socket. Every method raises `NoDaemon`, or the error that it replied."""

    path: Path
    trusted: frozenset[int] | None
    """The users who may be listening; None is anyone at all."""
    answer_within: float
    """Seconds that an answer may take."""

    def order(self, path: str, request: wire.SubmitRequest | wire.HoldRequest) -> bytes:
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

    def _limited(self, until: float | None) -> "Exchange":
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
        target = wire.API_PREFIX + path + (f"?{urlencode(asked)}" if asked else "")
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


def body_of(request: wire.SubmitRequest | wire.HoldRequest | wire.NestedRequest) -> bytes:
    """Return a request with an environment as JSON.

    Raises:
        TooLarge: it is over what the daemon reads.
    """
    body = msgspec.json.encode(request)
    if len(body) > wire.LARGEST_REQUEST:
        raise TooLarge(
            f"cannot submit the job: its arguments and environment make a request of "
            f"{format_size(len(body))}, and the daemon reads {format_size(wire.LARGEST_REQUEST)}",
            "pass large values in a file",
        )
    return body
