"""Bytes that are no requests, or two at once, on the daemon's socket: the next caller is served."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daemon_rig import Daemon
from fuzz import examples
from fuzz.unix import BASE, PATIENCE_S, connected, said, session_on

GET = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
JOB = json.dumps({"argv": ["true"], "cwd": "/", "environment": {}}).encode()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("bytes"))
    yield made.start()
    made.end_all()


def served(daemon: Daemon) -> None:
    """Check that the daemon lives, owes nobody an explanation, and answers."""
    assert daemon.process is not None
    assert daemon.process.poll() is None, daemon.log
    assert "Traceback" not in daemon.log, daemon.log
    with session_on(daemon.socket) as session:
        assert session.get(f"{BASE}/v1/status", timeout=PATIENCE_S).status_code == 200


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


_TOKENS = st.sampled_from(
    [
        *(GET, POST, JOB, b"\r\n", b"\r\n\r\n", b"\n", b"\0", b" ", b"HTTP/1.1", b"HTTP/2.0"),
        *(b"Content-Length: 0\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n"),
        *(b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n"),
        *(b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: chunked, x\r\n"),
        *(b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"5;x=y\r\n"),
        *(b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n"),
        *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"X: " + b"y" * 2000 + b"\r\n"),
        *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n"),
        *(b"GET http://other/v1/status HTTP/1.1\r\n", b"GET /v1/../v1/%00 HTTP/1.1\r\n"),
        *(b"GET /v1/jobs?user=%ff%fe&state=%00 HTTP/1.1\r\n", b"DELETE /v1/jobs/1 HTTP/1.1\r\n"),
        *(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b"Sec-WebSocket-Version: 13\r\n"),
    ]
)  # fmt: skip


@examples(150)
@given(st.lists(_TOKENS | st.binary(max_size=40), min_size=1, max_size=12))
@example([GET, b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"])
@example([b"CONNECT x:1 HTTP/1.1\r\n\r\n"])
@example([POST, b"Transfer-Encoding: chunked\r\n\r\n", b"ffffffffffffffff\r\n"])
@example([GET, b"\r\n"] * 6)
@example([POST, b"Content-Length: 100\r\n\r\n", JOB])
def test_no_bytes_make_the_daemon_fail(daemon: Daemon, parts: list[bytes]) -> None:
    answer = said(daemon.socket, b"".join(parts))
    assert not [status for status in statuses(answer) if status >= 500], answer
    served(daemon)


@examples(60)
@given(st.binary(min_size=1, max_size=3000))
def test_noise_is_no_request(daemon: Daemon, noise: bytes) -> None:
    assert 500 not in statuses(said(daemon.socket, noise))
    served(daemon)


@examples(60)
@given(st.data())
def test_a_request_is_the_same_in_whatever_pieces_it_comes(
    daemon: Daemon, data: st.DataObject
) -> None:
    whole = GET + b"Connection: close\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6)))
    answer = b""
    with connected(daemon.socket) as link:
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            link.sendall(whole[start:end])
        while piece := link.recv(1 << 16):
            answer += piece
    assert statuses(answer) == [200]


def test_requests_sent_ahead_of_an_answer_end_their_own_connection(daemon: Daemon) -> None:
    one = b"GET /v1/jobs/%d HTTP/1.1\r\nHost: x\r\n%s\r\n"
    many = b"".join(one % (10**9 + number, b"") for number in range(50))
    answer = said(daemon.socket, many + one % (7, b"Connection: close\r\n"), more=True)
    assert statuses(answer) in ([404, 400], [400])
    served(daemon)


def test_a_request_hidden_in_a_body_is_a_body(daemon: Daemon) -> None:
    hidden = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(JOB) + JOB
    before = len(daemon.status()["jobs"])
    for head in (
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(hidden)),
        b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(hidden),
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n%x\r\n" % len(hidden),
        b"Transfer-Encoding: identity\r\nContent-Length: %d\r\n\r\n" % len(hidden),
        b"Content-Length : 0\r\n\r\n",
        b"Content-Length: 0x10\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n",
    ):
        answer = said(daemon.socket, POST + head + hidden)
        assert 201 not in statuses(answer), (head, answer)
        served(daemon)
    assert len(daemon.status()["jobs"]) == before


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhel",
        b"5\r\nhello\r\n6\r\nhello\r\n0\r\n\r\n",
        b"zz\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"10000000000000000\r\nhello\r\n",
        b"5" + b"0" * 5000 + b"\r\nhello\r\n",
        b"0\r\nTrailer: " + b"x" * 200_000 + b"\r\n\r\n",
        b"5;" + b"x" * 200_000 + b"\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_chunks_of_a_wrong_size_end_their_connection_alone(daemon: Daemon, body: bytes) -> None:
    answer = said(daemon.socket, POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert not [status for status in statuses(answer) if status >= 500 or status < 300], answer
    served(daemon)


def test_an_upgrade_is_not_made(daemon: Daemon) -> None:
    for to in (b"websocket", b"h2c", b"TLS/1.0"):
        head = GET + b"Connection: Upgrade, close\r\nUpgrade: " + to + b"\r\n"
        answer = said(daemon.socket, head + b"Sec-WebSocket-Version: 13\r\n\r\n", more=True)
        assert 101 not in statuses(answer)
        served(daemon)


def test_who_asks_and_never_reads_holds_up_nobody(daemon: Daemon) -> None:
    links = [connected(daemon.socket) for _ in range(50)]
    try:
        for link in links:
            link.settimeout(1)
            try:
                link.sendall((GET + b"\r\n") * 2000)
            except TimeoutError:
                continue  # it takes no more until we read, which is as it should be
        served(daemon)
    finally:
        for link in links:
            link.close()
    served(daemon)


def test_who_hangs_up_in_the_middle_of_an_answer_is_missed_by_nobody(daemon: Daemon) -> None:
    for _ in range(100):
        link = connected(daemon.socket)
        # Closed at once and with a reset, whatever is on its way.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.sendall((GET + b"\r\n") * 20)
        link.close()
    served(daemon)


def test_json_that_is_deep_or_long_or_strange_is_refused(daemon: Daemon) -> None:
    for body in (
        b"[" * 1_000_000,
        b'{"a":' * 500_000,
        b'{"argv": ' + b"[" * 400_000 + b"]" * 400_000 + b"}",
        b'{"argv": ["x"], "argv": ["true"], "cwd": "/", "environment": []}',
        b'{"argv": [' + b"1e999999999," * 100_000 + b"1]}",
        b"\xff\xfe" + JOB.decode().encode("utf-16-le"),
        b'"' + b"\\ud800" * 100_000 + b'"',
        b"9" * 1_000_000,
    ):
        head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        answer = said(daemon.socket, head + body, more=True)
        assert statuses(answer) == [400], (body[:40], answer[:400])
    served(daemon)
