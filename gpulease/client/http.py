"""HTTP over a Unix socket: a connection for each request, and the reply that comes on it."""

import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

from gpulease.client.dial import dial, peer_uid
from gpulease.client.failures import error_of, lost, not_trusted


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
