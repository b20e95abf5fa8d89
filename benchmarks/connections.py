"""`status` of one user while another has a thousand connections that are idle or stream.

As root: the kernel tells the daemon which user is calling.
"""

import contextlib
import os
import resource
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.daemon import G, Running, occupied, order, running
from benchmarks.figures import Figure
from benchmarks.flood import _as_user, measured, open_to_all
from gpulease.client import Client
from gpulease.client.unix_socket import dial

HOLDER, CHANGER = 54_321, 54_323
"""Users without a passwd entry: their jobs are never launched."""
IDLE, STREAMS = 1000, 900
CHANGES_EACH_S = 5
SETTLES_S = 3
GOAL = 2


def run() -> Iterator[Figure | str]:
    """Measure each kind of connection, while jobs are submitted and cancelled."""
    if os.geteuid() != 0:
        yield "left out: it takes root to be two users"
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with running() as daemon, occupied(daemon), contextlib.ExitStack() as stack:
        open_to_all(daemon.socket)
        stack.enter_context(_as_user(CHANGER, lambda: change(daemon.socket)))
        job = daemon.client().submit(order("true")).id
        stream = b"GET /v1/jobs/%d/watch HTTP/1.1\r\nHost: g\r\n\r\n" % job
        yield beside(daemon, f"{IDLE} idle connections", IDLE, b"")
        yield beside(daemon, f"{STREAMS} streams", STREAMS, stream)


def beside(daemon: Running, what: str, count: int, request: bytes) -> Figure:
    alone = statistics.median(measured(daemon.socket)["status"])
    with _as_user(HOLDER, lambda: hold(daemon.socket, count, request)):
        time.sleep(SETTLES_S)
        ours = statistics.median(measured(daemon.socket)["status"])
    return Figure(
        f"status beside {what} of another user", ours * 1e3, "ms", GOAL, alone * 1e3, "alone"
    )


def hold(path: Path, count: int, request: bytes) -> None:
    """Keep so many connections, and make each request again when the daemon closes it."""
    links: list[socket.socket] = []
    while True:
        while len(links) < count:
            link = dial(path, 30.0)
            link.sendall(request)
            link.setblocking(False)
            links.append(link)
        time.sleep(1)
        for link in list(links):
            with contextlib.suppress(BlockingIOError):
                if not link.recv(1 << 16):
                    link.close()
                    links.remove(link)


def change(path: Path) -> None:
    """Submit and cancel a job some times a second."""
    client, wanted = Client(path), order("true", memory=80 * G)
    while True:
        client.cancel(client.submit(wanted).id)
        time.sleep(1 / CHANGES_EACH_S)
