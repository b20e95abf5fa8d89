"""The typed client of the daemon's API: one method for each route, over a Unix socket.

It knows HTTP and the wire shapes. It must not know the terminal, nor where sockets are looked for.
"""

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from gpulease import __version__, errors, wire
from gpulease.errors import GpuleaseError, NoDaemon, TooLarge
from gpulease.frames import BadFrame, FrameKind, FrameReader
from gpulease.units import format_size

View = TypeVar("View")

ANSWER_WITHIN = 30.0
"""Seconds that a request may take; the daemon answers in milliseconds."""
SILENT_FOR_AT_MOST = 120.0
"""Seconds without even a keep-alive after which a stream counts as lost."""
_LONGEST_ADDRESS = 107
"""Bytes of a socket's path that the kernel takes, see unix(7)."""
_CREDENTIALS = struct.Struct("3i")
_NO_DAEMON_HINT = (
    "ask whoever runs this machine to start gpuleased, or name another socket with --socket"
)


def dial(path: Path, within: float | None = None) -> socket.socket:
    """Connect to the Unix socket at `path`, however long the path; wait `within` seconds for it.

    Raises:
        OSError: nothing listens there, or it may not be reached.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A time limit of Python's own would make connect() fail at once while the queue of
        # connections is full; the kernel's waits for a place.
        _limit_sending(link, within or 0.0)
        _connect(link, path)
        _limit_sending(link, 0.0)
        link.settimeout(within)
    except BaseException:
        link.close()
        raise
    return link


def _limit_sending(link: socket.socket, seconds: float) -> None:
    whole, part = divmod(seconds, 1)
    value = struct.pack("ll", int(whole), int(part * 1_000_000))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _connect(link: socket.socket, path: Path) -> None:
    address = os.fsencode(path)
    if len(address) <= _LONGEST_ADDRESS:
        link.connect(address)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(os.fsencode(f"/proc/self/fd/{folder}/{path.name}"))
    finally:
        os.close(folder)


def peer_uid(link: socket.socket) -> int:
    """Return the user that the kernel names at the other end of `link`."""
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def answers(path: Path) -> bool:
    """Tell whether something listens on the Unix socket at `path`."""
    try:
        dial(path, 5.0).close()
    except OSError:
        return False
    return True


class _Connection(HTTPConnection):
    """HTTP to the socket at `path`, and to nobody but `trusted` users."""

    def __init__(self, path: Path, timeout: float, trusted: frozenset[int] | None) -> None:
        super().__init__("gpulease", timeout=timeout)
        self._path = path
        self._trusted = trusted

    def connect(self) -> None:
        self.sock = dial(self._path, self.timeout)
        if self._trusted is not None and (uid := peer_uid(self.sock)) not in self._trusted:
            raise NoDaemon(
                f"cannot trust the daemon on {self._path}: it belongs to user {uid}",
                "it would see the environment of your jobs; if you mean it, name it with --socket",
            )


class Client:
    """What the daemon on one socket can be asked; each call is a connection of its own.

    Every method raises `NoDaemon` when nothing answers, and otherwise the error that the daemon
    replied with, as the class that it was there.
    """

    def __init__(
        self,
        path: Path,
        *,
        trusted: frozenset[int] | None = None,
        answer_within: float = ANSWER_WITHIN,
    ) -> None:
        """`trusted` are the users who may be listening; None is anyone at all."""
        self.path = path
        self._trusted = trusted
        self._answer_within = answer_within

    def submit(self, request: wire.SubmitRequest) -> wire.JobView:
        """Queue a job; what is returned is on the daemon's disk.

        Raises:
            TooLarge: the request is over what the daemon reads.
        """
        body = msgspec.json.encode(request)
        if len(body) > wire.LARGEST_REQUEST:
            raise TooLarge(
                f"cannot submit the job: its arguments and environment make a request of "
                f"{format_size(len(body))}, and the daemon reads "
                f"{format_size(wire.LARGEST_REQUEST)}",
                "pass large values in a file",
            )
        return decode(wire.JobView, self._exchange("POST", "/jobs", body=body))

    def jobs(
        self, *, everything: bool = False, user: str | None = None, state: str | None = None
    ) -> wire.JobList:
        """Return the jobs that are not over, or `everything` that is remembered."""
        return decode(wire.JobList, self.jobs_json(everything=everything, user=user, state=state))

    def jobs_json(
        self, *, everything: bool = False, user: str | None = None, state: str | None = None
    ) -> bytes:
        """Return the reply of `jobs` as it came."""
        query = {"all": "true" if everything else None, "user": user, "state": state}
        return self._exchange("GET", "/jobs", query)

    def job(self, number: int) -> wire.JobView:
        """Return all about one job, with its events."""
        return decode(wire.JobView, self.job_json(number))

    def job_json(self, number: int) -> bytes:
        """Return the reply of `job` as it came."""
        return self._exchange("GET", f"/jobs/{number}")

    def cancel(self, number: int) -> wire.JobView:
        """Ask a job to end, and return it as it is then."""
        return decode(wire.JobView, self._exchange("POST", f"/jobs/{number}/cancel"))

    def status(self) -> wire.StatusView:
        """Return one look at the whole machine."""
        return decode(wire.StatusView, self.status_json())

    def status_json(self) -> bytes:
        """Return the reply of `status` as it came."""
        return self._exchange("GET", "/status")

    def doctor(self) -> wire.DoctorView:
        """Return what the daemon finds right and wrong with this machine."""
        return decode(wire.DoctorView, self._exchange("GET", "/doctor"))

    def watch(self, number: int) -> Iterator[wire.JobView]:
        """Yield a job at once, at each change and now and then between, until it has ended.

        Raises:
            NoDaemon: the stream broke off before the end of the job.
        """
        last: wire.JobView | None = None
        with closing(self._open("GET", f"/jobs/{number}/watch")) as reply:
            for line in _lines(reply, self.path):
                last = decode(wire.JobView, line) if line else last
                if last is not None:
                    yield last
        if last is None or last.state != "ended":
            raise _lost(self.path)

    def logs(
        self,
        number: int,
        *,
        stdout: bool = True,
        stderr: bool = True,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the kept output of a job, piece by piece, each with the stream that it is of."""
        query = {
            "stdout": str(stdout).lower(),
            "stderr": str(stderr).lower(),
            "tail": None if tail is None else str(tail),
            "follow": str(follow).lower(),
        }
        frames = FrameReader()
        with closing(self._open("GET", f"/jobs/{number}/logs", query)) as reply:
            # A job may be silent for days, and this stream has no keep-alives.
            reply.settimeout(None if follow else ANSWER_WITHIN)
            try:
                while piece := reply.response.read1(1 << 16):
                    yield from frames.feed(piece)
            except (OSError, HTTPException, BadFrame) as error:
                raise _lost(self.path) from error

    def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        with closing(self._open(method, path, query, body, self._answer_within)) as reply:
            return reply.whole(self.path)

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
        timeout: float = SILENT_FOR_AT_MOST,
    ) -> "_Reply":
        connection = _Connection(self.path, timeout, self._trusted)
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        target = wire.API_PREFIX + path + (f"?{urlencode(asked)}" if asked else "")
        headers = {"User-Agent": f"gpulease/{__version__}", "Content-Type": "application/json"}
        try:
            connection.request(method, target, body=body, headers=headers)
            link = connection.sock  # http.client forgets it once the reply is the last on it
            reply = _Reply(connection, connection.getresponse(), link)
            reply.refuse_errors(self.path)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | HTTPException):
                raise _no_daemon(self.path, error) from error
            raise
        return reply


class _Reply:
    """A response and the connection that it comes on, which close together."""

    def __init__(
        self, connection: _Connection, response: HTTPResponse, link: socket.socket
    ) -> None:
        self._connection = connection
        self._link = link
        self.response = response

    def settimeout(self, seconds: float | None) -> None:
        self._link.settimeout(seconds)

    def whole(self, path: Path) -> bytes:
        try:
            return self.response.read()
        except (OSError, HTTPException) as error:
            raise _lost(path) from error

    def refuse_errors(self, path: Path) -> None:
        if not 200 <= self.response.status < 300:
            raise _error_of(self.response.status, self.whole(path))

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def _lines(reply: _Reply, path: Path) -> Iterator[bytes]:
    """Yield each line without its end; an empty one is a keep-alive."""
    try:
        while line := reply.response.readline():
            yield line.strip()
    except (OSError, HTTPException) as error:
        raise _lost(path) from error


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
            "after an upgrade restart the daemon: systemctl restart gpuleased",
        ) from error


def encode(view: object) -> bytes:
    """Write a wire object as the JSON that the daemon would send."""
    return msgspec.json.encode(view)


def indent(body: bytes) -> str:
    """Return JSON laid out for people, with every member in its place."""
    return msgspec.json.format(body, indent=2).decode()


def _error_of(status: int, body: bytes) -> GpuleaseError:
    try:
        told = msgspec.json.decode(body, type=wire.ErrorReply).error
    except msgspec.MsgspecError:
        return GpuleaseError(
            f"cannot get an answer: the daemon replied with HTTP {status}",
            "what happened is in its log: journalctl -u gpuleased",
        )
    return errors.BY_CODE.get(told.code, GpuleaseError)(told.message, told.hint)


def _no_daemon(path: Path, error: Exception) -> NoDaemon:
    shown = os.fsencode(path).decode(errors="replace")
    match error:
        case FileNotFoundError() | NotADirectoryError():
            why, hint = f"there is no socket {shown}", _NO_DAEMON_HINT
        case ConnectionRefusedError():
            why, hint = f"nothing listens on {shown}", _NO_DAEMON_HINT
        case PermissionError():
            why = f"you may not open the socket {shown}"
            hint = "the socket of a shared daemon is open to every user: gpulease doctor, as root"
        case TimeoutError() | BlockingIOError():
            why = f"it does not answer on {shown}"
            hint = "its log says what it is busy with: journalctl -u gpuleased"
        case _:
            why, hint = f"{shown}: {error}", _NO_DAEMON_HINT
    return NoDaemon(f"cannot reach the daemon: {why}", hint)


def _lost(path: Path) -> NoDaemon:
    return NoDaemon(
        f"cannot read on from the daemon: the connection to {path} broke off",
        "jobs go on without it; ask again: gpulease list",
    )
