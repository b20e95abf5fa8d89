"""HTTP against a server that sends exactly what a test says."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from gpulease.client import http
from gpulease.client.transport import Transport
from gpulease.client.unix_socket import dial
from gpulease.errors import AnswerLost, NoDaemon

Serve = Callable[..., Path]
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that answers one request with some pieces of bytes."""
    threads = []

    def start(*pieces: bytes, reads: bool = True) -> Path:
        path = tmp_path / f"s{len(threads)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)

        def answer() -> None:
            with suppress(BrokenPipeError), listener, listener.accept()[0] as link:
                if reads:
                    link.recv(1 << 20)
                for piece in pieces:
                    link.sendall(piece)
                    time.sleep(0.001)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return path

    yield start
    for thread in threads:
        thread.join(10)


def ask(path: Path) -> bytes:
    return Transport(path, None, 5.0).ask("GET", "/status")


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"Content-Length: 5\r\n\r\nhello",),
        (HEAD + b"content-length:5\r\n\r\n", b"he", b"llo and what follows it"),
        (b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"),
        (CHUNKED, b"2\r\nhe\r\n3;x=1\r\nl", b"lo\r", b"\n0\r\nTrailer: 1\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD, b"Content-Length: 5\r", b"\n\r\nhello"),
    ],
)
def test_a_body_is_read_by_its_length_by_chunks_or_to_its_end(
    serve: Serve, pieces: tuple[bytes, ...]
) -> None:
    assert ask(serve(*pieces)) == b"hello"


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b"HTTP/1.1 2",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 6\r\n\r\nhello",
        CHUNKED + b"5\r\nhel",
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
        HEAD + b"X: y\r\n" * 20_000,
        HEAD + b"x" * 200_000,
    ],
)
def test_an_answer_that_is_incomplete_or_no_http_is_lost(serve: Serve, piece: bytes) -> None:
    with pytest.raises(AnswerLost):
        ask(serve(piece))


def test_lines_come_as_soon_as_they_are_there(serve: Serve) -> None:
    path = serve(CHUNKED, b"4\r\none\n\r\n", b"1\r\n\n\r\n", b"7\r\ntwo\nthr\r\n0\r\n\r\n")
    with Transport(path, None).open("GET", "/jobs/1/watch") as reply:
        lines = reply.lines()
        assert next(lines) == b"one"
        assert list(lines) == [b"", b"two", b"thr"]


def test_a_refusal_is_read_though_the_request_was_not(serve: Serve) -> None:
    body = b'{"error":{"code":"too_many","message":"cannot connect: too many","hint":null}}'
    refusal = b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    path = serve(refusal, reads=False)
    link = dial(path, 5.0)
    time.sleep(0.05)
    reply = http.request(link, "POST", "/v1/jobs", b"x" * (4 << 20))
    assert reply.status == 429
    assert reply.read() == body
    reply.close()


def test_what_was_never_sent_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon) as raised:
        ask(tmp_path / "none")
    assert not isinstance(raised.value, AnswerLost)


def test_queries_are_encoded() -> None:
    assert http.with_query("/jobs", {"all": None}) == "/jobs"
    target = http.with_query("/jobs", {"user": "a b&c=\u00e9/+", "all": "true"})
    assert parse_qs(target.partition("?")[2]) == {"user": ["a b&c=\u00e9/+"], "all": ["true"]}
    assert http.quoted("0:1/x", safe=":") == "0:1%2Fx"
