"""The event stream: what it costs the daemon, and what slow and dead browsers cost the server."""

import os
import re
import select
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

from daemon_rig import PATIENCE_S, Daemon, open_folder, wait_for
from web.rig import Web, web

BROWSERS = 100
_PIECE = 1 << 16


class Counted:
    """Listens before a daemon, forwards each connection, and counts the requests by their path."""

    def __init__(self, path: Path, daemon: Path) -> None:
        self.asked: list[str] = []
        self._daemon = daemon
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        path.chmod(0o666)
        self._listening.listen(100)
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def statuses(self) -> int:
        return sum(path.startswith("/v1/status") for path in self.asked)

    def _accept(self) -> None:
        while True:
            link, _ = self._listening.accept()
            with link, socket.socket(socket.AF_UNIX) as onward:
                request = link.recv(_PIECE)
                if not request:
                    return
                self.asked.append(request.split()[1].decode())
                onward.connect(str(self._daemon))
                onward.sendall(request)
                self._forward(link, onward)

    def _forward(self, link: socket.socket, onward: socket.socket) -> None:
        """Forward the reply until either side ends the connection."""
        with suppress(OSError):
            while onward in select.select([link, onward], [], [], PATIENCE_S)[0]:
                if not (piece := onward.recv(_PIECE)):
                    return
                link.sendall(piece)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self._listening.getsockname())
        self._thread.join()
        self._listening.close()


@contextmanager
def counted(daemon: Daemon) -> Iterator[tuple[Counted, Web]]:
    """Yield what counts the requests to a daemon, and a web server that goes through it."""
    with ExitStack() as stack:
        path = stack.enter_context(open_folder()) / "s"
        counting = stack.enter_context(closing(Counted(path, daemon.socket)))
        yield counting, stack.enter_context(web(path))


class Browser:
    """An event stream that is read by a thread."""

    def __init__(self, served: Web) -> None:
        self.link = socket.create_connection((served.host, served.port))
        self.link.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.text = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while piece := self.link.recv(_PIECE):
                self.text += piece
        except OSError:
            pass

    def close(self) -> None:
        with suppress(OSError):  # it may be closed
            self.link.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.link.close()


def test_a_hundred_browsers_ask_the_daemon_as_often_as_one(daemon: Daemon) -> None:
    with counted(daemon) as (counting, served), ExitStack() as stack:
        browsers = [stack.enter_context(closing(Browser(served))) for _ in range(BROWSERS)]
        wait_for(
            "all have the page", lambda: all(b"event: queue" in each.text for each in browsers)
        )
        before, begun = counting.statuses(), time.monotonic()
        wait_for("five more", lambda: counting.statuses() >= before + 5)
        asked, took = counting.statuses() - before, time.monotonic() - begun
        assert asked <= took + 2, "one each second for all listeners"
        job = daemon.submit("--mem", "1G", "--name", "seen by all", "sleep", "600")
        wait_for("all see it", lambda: all(b"seen by all" in each.text for each in browsers))
        pieces = {re.findall(rb"event: jobs\ndata: .*\n(?:data: .*\n)*", each.text)[-1]
                  for each in browsers}  # fmt: skip
        assert len(pieces) == 1, "the same bytes"
        daemon.cancel(job)


def test_nobody_listens_and_nobody_asks(daemon: Daemon) -> None:
    with counted(daemon) as (counting, served):
        with closing(Browser(served)) as browser:
            wait_for("it has the page", lambda: b"event: queue" in browser.text)
        wait_for("it has ended", lambda: _is_quiet(counting))
        with closing(Browser(served)) as browser:
            wait_for("it asks again", lambda: b"event: queue" in browser.text)


def _is_quiet(counting: Counted) -> bool:
    before = counting.statuses()
    time.sleep(2.5)  # as long as two questions would take to come
    return counting.statuses() == before


def test_only_what_has_changed_is_sent(daemon: Daemon, served: Web) -> None:
    with closing(Browser(served)) as browser:
        wait_for("it has the page", lambda: b"event: queue" in browser.text)
        first = browser.text
        daemon.submit("--mem", "1G", "--held", "--name", "held", "sleep", "600")
        wait_for("it sees it", lambda: b"held" in browser.text[len(first) :])
        later = browser.text[len(first) :]
        assert b"event: jobs" not in later, "no job has started"


def test_a_browser_that_accepts_gzip_gets_the_same_in_fewer_bytes(
    daemon: Daemon, served: Web
) -> None:
    for number in range(20):
        daemon.submit("--mem", "300M", "--name", f"row {number}", "sleep", "600")

    def first(**headers: str) -> tuple[bytes, bytes]:
        with closing(HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)) as link:
            link.request("GET", "/events", headers=headers)
            reply = link.getresponse()
            is_packed = reply.headers["content-encoding"] == "gzip"
            unpack = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS).decompress
            received = text = b""
            while b"event: queue" not in text:
                piece = reply.read1(_PIECE)
                received, text = received + piece, text + (unpack(piece) if is_packed else piece)
            return received, text

    plain, packed = first(), first(**{"Accept-Encoding": "br, gzip"})
    assert plain[0] == plain[1]
    assert _names(plain[1]) == _names(packed[1])
    assert len(packed[0]) < len(plain[0]) / 5


def _names(text: bytes) -> list[bytes]:
    return re.findall(rb"^event: (\w+)$", text, re.MULTILINE)


def test_browsers_beyond_the_limit_are_refused_and_one_that_left_makes_room(
    daemon: Daemon,
) -> None:
    with ExitStack() as stack, web(daemon.socket, "--most-listeners", "3") as served:
        browsers = [stack.enter_context(closing(Browser(served))) for _ in range(3)]
        wait_for("all listen", lambda: all(b"200 OK" in each.text for each in browsers))
        refused = served.get("/events")
        assert (refused.status, refused.headers["retry-after"]) == (503, "30")
        assert served.get("/").status == 200
        browsers[0].close()
        wait_for("there is room", lambda: _listens(served))


def _listens(served: Web) -> bool:
    with served.open("/events") as reply:
        return reply.status == 200


def resident(served: Web) -> int:
    return int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGESIZE"
    )


def test_browsers_that_do_not_read_hold_no_memory(daemon: Daemon, served: Web) -> None:
    # Long names make each state some 200 KiB, more than the buffers of a connection.
    for number in range(20):
        daemon.submit("--mem", "300M", "--name", f"{number} {'x' * 120}", "sh", "-c",
                      "sleep 600; : " + "y" * 5000)  # fmt: skip
    with ExitStack() as stack:
        for _ in range(50):
            link = stack.enter_context(closing(socket.socket()))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect((served.host, served.port))
            link.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with closing(Browser(served)) as browser:
            wait_for("it has the page", lambda: b"event: queue" in browser.text)
            before = resident(served)
            for number in range(5):
                name = f"state {number}"
                job = daemon.submit("--mem", "300M", "--name", name, "sleep", "600")
                wait_for("it is sent", lambda name=name: name.encode() in browser.text)
                daemon.cancel(job)
            assert resident(served) - before < 50 * 200_000, "no states are queued"
