"""Jobs that do nothing, from the submission to the end, beside a loop that forks and waits.

One client with eight connections that stay open submits them; each answer means that the job is on
disk. Eight run at a time.
"""

import itertools
import os
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.daemon import Running, order, running
from benchmarks.figures import Figure
from benchmarks.timing import seconds
from gpulease.store.store import count_jobs
from gpulease.wire.requests import QueueRequest, SubmitRequest

G = 1024**3
JOBS = 1000
AT_A_TIME = 8
WANTED_PER_S = 200.0
WANTED_CPU_MS = 8.0
ROUNDS = 3
_LOOK_S = 0.02
_END_OF_HEAD = b"\r\n\r\n"
NO_OP = replace(order("true", memory=80 * G), environment={"PATH": os.environ["PATH"]})


class Connection:
    """A connection that sends one request after another."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))

    def send(self, request: SubmitRequest) -> None:
        body = msgspec.json.encode(request)
        head = (
            "POST /v1/jobs HTTP/1.1\r\nHost: gpulease\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self.socket.sendall(head.encode() + _END_OF_HEAD + body)

    def answer(self) -> bytes:
        """Return the body of the answer."""
        received = b""
        while _END_OF_HEAD not in received:
            received += self._piece()
        head, _, body = received.partition(_END_OF_HEAD)
        assert b" 201 " in head.partition(b"\r\n")[0], received
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        while len(body) < length:
            body += self._piece()
        return body

    def _piece(self) -> bytes:
        piece = self.socket.recv(1 << 16)
        assert piece, "the daemon closed the connection"
        return piece


def submit_all(path: Path, number: int, request: SubmitRequest = NO_OP) -> None:
    """Submit so many jobs, some at a time."""
    connections = {link.socket: link for link in (Connection(path) for _ in range(AT_A_TIME))}
    left = itertools.count(number, -1)
    asked = 0
    for link in connections.values():
        if next(left) > 0:
            link.send(request)
            asked += 1
    while asked:
        for ready in select.select(list(connections), (), ())[0]:
            connections[ready].answer()
            asked -= 1
            if next(left) > 0:
                connections[ready].send(request)
                asked += 1
    for opened in connections:
        opened.close()


def until_ended(daemon: Running, number: int) -> None:
    """Wait until so many jobs have ended; asks the database and not the daemon."""
    while (found := count_jobs(_database(daemon))) is None or found.ended < number:
        time.sleep(_LOOK_S)


def _database(daemon: Running) -> Path:
    return daemon.socket.parent / "state" / "gpulease.db"


def fork_all() -> None:
    """Start as many processes, as many at a time."""
    for begun in range(JOBS):
        if begun >= AT_A_TIME:
            os.wait()
        if os.fork() == 0:
            os.execv("/usr/bin/true", ["true"])
    for _ in range(AT_A_TIME):
        os.wait()


def one_by_one(daemon: Running, before: int) -> None:
    submit_all(daemon.socket, JOBS)
    until_ended(daemon, before + JOBS)


def as_array(daemon: Running, before: int) -> None:
    link = Connection(daemon.socket)
    link.send(replace(NO_OP, queue=QueueRequest(array=f"1-{JOBS}")))
    link.answer()
    until_ended(daemon, before + JOBS)
    link.socket.close()


def run() -> Iterator[Figure]:
    """Measure both ways in alternation with the plain loop."""
    ways = {"one request each": one_by_one, "one array": as_array}
    taken: dict[str, list[float]] = {name: [] for name in (*ways, "fork and exec")}
    cpu_ms: dict[str, list[float]] = {name: [] for name in ways}
    with running() as daemon:
        ended = 0
        for _ in range(ROUNDS):
            for name, way in ways.items():
                begun_cpu, begun = daemon.cpu_s(), time.perf_counter()
                way(daemon, ended)
                taken[name].append(time.perf_counter() - begun)
                ended += JOBS
                cpu_ms[name].append((daemon.cpu_s() - begun_cpu) / JOBS * 1e3)
            taken["fork and exec"].append(seconds(fork_all))
    plain = JOBS / median(taken["fork and exec"])
    for name in ways:
        per_s = JOBS / median(taken[name])
        yield Figure(
            f"{JOBS} jobs that do nothing, {AT_A_TIME} at a time, {name} "
            f"(fork and exec {plain:.0f} jobs/s)",
            per_s, "jobs/s", WANTED_PER_S, higher_is_better=True,
        )  # fmt: skip
        what = f"CPU of all processes for each of them, {name}"
        yield Figure(what, median(cpu_ms[name]), "ms", WANTED_CPU_MS)
