"""The web page: what browsers that follow the machine cost the daemon and the web server."""

import contextlib
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.daemon import G, Running, order, running
from benchmarks.figures import Figure

BROWSERS = 100
JOBS = 50
ROUNDS = 3
FOLLOWS_S = 8.0
CHANGES = """
import time
while True:
    held = bytearray(200 << 20); time.sleep(0.7); del held; time.sleep(0.7)
"""
"""A job that uses now more, now less: what the browsers see changes each second."""
_spawn = multiprocessing.get_context("spawn")


class _Cost(NamedTuple):
    """CPU time in milliseconds for each second of following."""

    daemon: float
    web: float


def run() -> Iterator[Figure]:
    """Measure many browsers in alternation with one, while 50 jobs run."""
    with running() as daemon, serving(daemon.socket) as (pid, port):
        client = daemon.client()
        client.submit(order(sys.executable, "-c", CHANGES, memory=2 * G))
        for _ in range(JOBS - 1):
            client.submit(order("sleep", "3600", memory=2 * G))
        while len(client.status(queue=0).jobs) < JOBS:
            time.sleep(0.05)
        costs: dict[int, list[_Cost]] = {1: [], BROWSERS: []}
        for _ in range(ROUNDS):
            for browsers, found in costs.items():
                found.append(_following(daemon, pid, port, browsers))
        many, one = costs[BROWSERS], costs[1]
        yield Figure(
            f"CPU of the daemon a second, {BROWSERS} browsers follow {JOBS} jobs",
            median(each.daemon for each in many), "ms", 1.2,
            median(each.daemon for each in one), "one browser",
        )  # fmt: skip
        yield Figure(
            f"CPU of gpulease-web a second, {BROWSERS} browsers follow {JOBS} jobs",
            median(each.web for each in many), "ms", 10.0,
            median(each.web for each in one), "one browser",
        )  # fmt: skip
        sent, plain = (_bytes_a_second(port, each) for each in ("gzip", "identity"))
        what = f"bytes a second of a tab that follows {JOBS} jobs"
        yield Figure(what, sent, "bytes", 0.2, plain, "not compressed")
        for job in client.status(queue=0).jobs:
            client.cancel(job.id, grace=0)


def _following(daemon: Running, web: int, port: int, browsers: int) -> _Cost:
    with ExitStack() as stack:
        for _ in range(browsers):
            link = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            link.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            stack.callback(_drained(link))
        time.sleep(1.5)  # until the first state is sent
        before, mine = _cpu_ms(daemon.pid), _cpu_ms(web)
        time.sleep(FOLLOWS_S)
        return _Cost((_cpu_ms(daemon.pid) - before) / FOLLOWS_S, (_cpu_ms(web) - mine) / FOLLOWS_S)


def _bytes_a_second(port: int, encoding: str) -> float:
    """Return what a browser receives, without the first state."""
    with closing(socket.create_connection(("127.0.0.1", port))) as link:
        head = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: {encoding}"
        link.sendall(f"{head}\r\n\r\n".encode())
        time.sleep(1.5)
        link.recv(1 << 24)
        time.sleep(FOLLOWS_S)
        return len(link.recv(1 << 24)) / FOLLOWS_S


def _drained(link: socket.socket) -> Callable[[], None]:
    """Read a stream in a thread, and return what ends that."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while link.recv(1 << 16):
                pass

    thread = threading.Thread(target=read)
    thread.start()

    def end() -> None:
        link.shutdown(socket.SHUT_RDWR)
        thread.join()

    return end


def _cpu_ms(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond: proc_schedstat, all threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


@contextlib.contextmanager
def serving(daemon: Path) -> Iterator[tuple[int, int]]:
    """Run a web server in another process, also as root, and yield its pid and port."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=_serve, args=(daemon, theirs), daemon=True)
    process.start()
    yield process.pid or 0, ours.recv()
    process.terminate()
    process.join()


def _serve(daemon: Path, started: Connection) -> None:
    import uvicorn

    from gpulease.client import Client
    from gpulease.web.app import build
    from gpulease.web.daemon_reader import DaemonReader
    from gpulease.web.live import LiveStatus

    reader = DaemonReader(Client(daemon))
    listening = socket.create_server(("127.0.0.1", 0), backlog=2 * BROWSERS)
    started.send(listening.getsockname()[1])
    settings = uvicorn.Config(
        build(reader, LiveStatus(reader)), lifespan="off", access_log=False, log_level="error"
    )
    uvicorn.Server(settings).run(sockets=[listening])
