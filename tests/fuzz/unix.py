"""HTTP on a Unix socket for the library that generates requests, and bytes for ourselves."""

import socket
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

PATIENCE_S = 120.0
BASE = "http://gpulease"


def session_on(path: Path) -> requests.Session:
    """Return a session whose requests to `BASE` go to the socket at `path`."""
    session = requests.Session()
    session.mount(BASE, _Adapter(path))
    return session


class _Connection(HTTPConnection):
    path: Path

    def _new_conn(self) -> socket.socket:
        return connected(self.path)


class _Adapter(HTTPAdapter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        connection = type("_Here", (_Connection,), {"path": path})
        self._pool = HTTPConnectionPool("gpulease", maxsize=1)
        self._pool.ConnectionCls = connection

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> HTTPConnectionPool:
        return self._pool


def connected(path: Path) -> socket.socket:
    """Return a socket that is connected to `path`, however long that is; patient, not endless."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(path))
    made.settimeout(PATIENCE_S)
    return made


def said(path: Path, data: bytes, *, more: bool = False) -> bytes:
    """Send `data` and return all that is answered until the daemon closes.

    It is told that nothing more comes, unless `more`: then it is for the daemon to lose patience.
    """
    answer = b""
    with connected(path) as link:
        try:
            link.sendall(data)
            if not more:
                link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                answer += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
    return answer
