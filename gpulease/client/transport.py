"""The daemon on one of the usual sockets, requests to it, and what can go wrong with them.

It knows no routes, and of JSON only the errors in replies.
"""

from __future__ import annotations

import os
import time

from gpulease import locations
from gpulease.client import http
from gpulease.client.unix_socket import answers, dial, peer_uid, trusted_users
from gpulease.errors import AnswerLost, GpuleaseError, NoDaemon, RecordLocked, TooLarge
from gpulease.record import record, replace
from gpulease.wire.text import API_PREFIX, LARGEST_REQUEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike
    from pathlib import Path
    from typing import TypeVar

    from gpulease.client.unix_socket import Link

    Answer = TypeVar("Answer")

ANSWER_WITHIN = 30.0
"""Timeout of an answer in seconds; the daemon answers in milliseconds."""
_UNLOCKED_WITHIN = 300.0
"""Seconds for another program to unlock the daemon's database, as for a copy of it."""
_BACK_WITHIN = 10.0
"""Seconds for a daemon to restart after a lost answer; it takes two."""
_TRY_EVERY = 0.3
_TRY_LOCKED_EVERY = 1.0
_DIAL_WITHIN = 5.0
"""Seconds for a daemon to accept a connection."""
LONGEST_SILENCE = 120.0
"""Seconds without a keep-alive after which a stream counts as lost."""


class Reply:
    """The reply of the daemon on `path`, which the caller closes."""

    def __init__(self, reply: http.Reply, path: Path | str) -> None:
        self._reply = reply
        self._path = path

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *error: object) -> None:
        self._reply.close()

    def settimeout(self, seconds: float | None) -> None:
        """Wait at most so many seconds for the next data."""
        self._reply.settimeout(seconds)

    def interrupt(self) -> None:
        """End the reply early, also while another thread reads it: that one gets `AnswerLost`."""
        self._reply.interrupt()

    def read(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            AnswerLost: it ended too early.
        """
        return self._until_lost(self._reply.pieces())

    def lines(self) -> Iterator[bytes]:
        """Yield each line without its end; an empty line is a keep-alive.

        Raises:
            AnswerLost: it ended too early.
        """
        return self._until_lost(self._reply.lines())

    def _until_lost(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from parts
        except OSError as error:
            from gpulease.client.errors import lost

            raise lost(self._path) from error

    def error(self) -> GpuleaseError | None:
        """Return the error with which the daemon has replied, if it has."""
        if 200 <= self._reply.status < 300:
            return None
        from gpulease.client.errors import error_of

        return error_of(self._reply.status, self.read(), self._path)


@record(frozen=True)
class Transport:
    """The daemon on one socket. Every method raises `NoDaemon`, or the error in the reply."""

    path: Path | str
    trusted: frozenset[int] | None
    """The users that may listen there; None: any."""
    answer_within: float = ANSWER_WITHIN
    """Timeout of an answer in seconds."""
    locked: Callable[[RecordLocked], None] | None = None
    """Called every second while a submission waits for a database that is locked; None: it fails
    at once."""

    def within(self, seconds: float) -> Transport:
        """Return this transport with another timeout of answers."""
        return replace(self, answer_within=seconds)

    def submit(self, path: str, body: bytes) -> bytes:
        """Post a submission, which has a key, and again if the answer is lost.

        Raises:
            AnswerLost: it may be queued, and no daemon answers.
            TooLarge: the request exceeds what the daemon reads.
        """
        return self.submitted(body, lambda daemon: daemon.ask("POST", path, body=body))

    def submitted(self, body: bytes, post: Callable[[Transport], Answer]) -> Answer:
        """Return what `post` returns, which posts a submission. Raises as `submit`."""
        try:
            return self._until_answered(body, post)
        except AnswerLost as doubt:
            raise AnswerLost(
                f"{doubt.message}; the daemon may have queued the job",
                "when the daemon is back, gpulease list shows it",
            ) from doubt

    def post_until_answered(self, path: str, body: bytes) -> bytes:
        """Post a request that may be repeated, and again if the answer is lost.

        Raises:
            AnswerLost: the request was sent, and the daemon does not come back.
            TooLarge: the request exceeds what the daemon reads.
        """
        return self._until_answered(body, lambda daemon: daemon.ask("POST", path, body=body))

    def _until_answered(self, body: bytes, post: Callable[[Transport], Answer]) -> Answer:
        """Call `post`, and again if the answer is lost or the database is locked.

        The request contains an environment, so it is sent to daemons of root and the caller only,
        even on a socket that the user has named.

        Raises:
            AnswerLost: the request was sent, and the daemon does not come back.
            RecordLocked: the database is still locked after some minutes.
            TooLarge: the request exceeds what the daemon reads.
        """
        _check_size(body)
        careful = replace(self, trusted=self.trusted or trusted_users())
        until: float | None = None
        unlocked_until = time.monotonic() + _UNLOCKED_WITHIN
        while True:
            try:
                return post(careful._limited(until))
            except RecordLocked as error:
                if self.locked is None or time.monotonic() > unlocked_until:
                    raise
                self.locked(error)
                time.sleep(_TRY_LOCKED_EVERY)
                continue
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

    def _limited(self, until: float | None) -> Transport:
        """Return this transport with a timeout of at most what is left `until` then."""
        if until is None:
            return self
        left = max(_TRY_EVERY, until - time.monotonic())
        return self.within(min(left, self.answer_within))

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        """Return the whole reply to a request."""
        with self.open(method, path, query, body, self.answer_within) as reply:
            return reply.read()

    def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
        timeout: float = LONGEST_SILENCE,
        meanwhile: Callable[[], None] | None = None,
    ) -> Reply:
        """Return the reply to a request as soon as its head is there; the caller closes it.

        None in `query` is left out. `timeout` is in seconds without data. `meanwhile` is called
        once the request is sent.
        """
        target = http.with_query(API_PREFIX + path, query)
        link = self._connect(timeout)
        try:
            reply = Reply(http.request(link, method, target, body, meanwhile), self.path)
            if (error := reply.error()) is not None:
                raise error
        except BaseException as error:
            link.close()
            if isinstance(error, OSError):
                from gpulease.client.errors import answer_lost

                raise answer_lost(self.path, error) from error
            raise
        return reply

    def _connect(self, timeout: float) -> Link:
        try:
            link = dial(self.path, timeout)
        except OSError as error:
            from gpulease.client.errors import no_daemon

            raise no_daemon(self.path, error) from error
        if self.trusted is not None and (uid := peer_uid(link)) not in self.trusted:
            from gpulease.client.errors import not_trusted

            link.close()
            raise not_trusted(self.path, uid)
        return link


def listening(
    named: PathLike[str] | str | None, environment: Mapping[str, str]
) -> Transport | None:
    """Return the daemon of --socket (`named`) or GPULEASE_SOCKET, the machine's, or the user's own.

    The first is not asked whether it answers. None: no daemon listens, or more is to be checked:
    `discovery` and `user_daemon` know what to do then.
    """
    if (chosen := _chosen(named, environment)) is not None:
        return chosen
    try:
        dial(locations.SYSTEM_SOCKET, _DIAL_WITHIN).close()
    except FileNotFoundError:
        return _own(environment)
    except OSError:
        return None  # it restarts
    return Transport(locations.SYSTEM_SOCKET, trusted_users())


def _chosen(named: PathLike[str] | str | None, environment: Mapping[str, str]) -> Transport | None:
    """Return the daemon of --socket or GPULEASE_SOCKET."""
    if named:
        return Transport(os.fspath(named), None)
    # Another user may have set it (su, sudo -E).
    path = environment.get("GPULEASE_SOCKET")
    return Transport(path, trusted_users()) if path else None


def candidates(named: str | None, environment: Mapping[str, str]) -> tuple[Transport, ...]:
    """Return the daemons to try, in order, as `config.candidate_sockets` has their sockets."""
    if (chosen := _chosen(named, environment)) is not None:
        return (chosen,)
    paths = locations.SYSTEM_SOCKET, locations.personal_socket(environment)
    return tuple(Transport(path, trusted_users()) for path in paths)


def _own(environment: Mapping[str, str]) -> Transport | None:
    """Return the user's own daemon, if the machine has none."""
    if os.path.isdir(os.path.dirname(locations.SYSTEM_SOCKET)):
        return None  # the machine's daemon restarts
    if "GPULEASE_SIMULATE" in environment:
        return None  # the user's daemon may simulate other GPUs than this, and a warning says so
    path = locations.personal_socket(environment)
    return Transport(path, trusted_users()) if answers(path) else None


def _check_size(body: bytes) -> None:
    if len(body) > LARGEST_REQUEST:
        from gpulease.units import format_size

        raise TooLarge(
            f"cannot submit: arguments and environment make a request of {format_size(len(body))}, "
            f"and the daemon reads at most {format_size(LARGEST_REQUEST)}",
            "pass large values in a file",
        )


def new_key() -> str:
    """Return a key for a submission; the daemon queues one job for all requests with it."""
    return os.urandom(16).hex()
