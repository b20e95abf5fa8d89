"""Connections that send no whole request: they are closed, and keep nobody out."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from daemon_rig import PATIENCE_S, wait_for
from gpulease.web.main import BoundedProtocol

MOST = 5


class Hasty(BoundedProtocol):
    """A protocol with a short deadline."""

    head_within_s = 0.3


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a server for a few connections."""
    listening = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        PlainTextResponse("served"), http=Hasty, lifespan="off", log_level="error",
        limit_concurrency=MOST,
    )  # fmt: skip
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def status(port: int) -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as made:
        made.request("GET", "/")
        return made.getresponse().status


def is_closed(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def test_those_without_a_whole_request_keep_nobody_out(port: int) -> None:
    with ExitStack() as stack:
        links = [stack.enter_context(connected(port)) for _ in range(MOST)]
        for link in links[1:]:
            link.sendall(b"GET / HTTP/1.1\r\nHost:")
        wait_for("there is room", lambda: status(port) == 200)
        assert all(map(is_closed, links))


def test_one_that_goes_on_with_half_a_request_is_closed(port: int) -> None:
    with connected(port) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b"served" not in answer:
            answer += link.recv(4096)
        link.sendall(b"\r\n")
        assert is_closed(link)


def test_a_head_without_end_is_refused(port: int) -> None:
    with connected(port) as link:
        link.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                link.sendall(b"X-Long: " + b"x" * 8000 + b"\r\n")
