"""Answers about a long queue: while it rests, and while other jobs start and end beside it."""

import contextlib
import multiprocessing
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.daemon import QUEUED, Running, occupied, order, running
from benchmarks.figures import Figure
from benchmarks.jobs import NO_OP, submit_all, until_ended
from benchmarks.timing import paired, seconds
from gpulease.wire.requests import ClaimRequest, QueueRequest

G = 1024**3
TIMES = 25
JOBS = 500
ROUNDS = 3
ASKS_EVERY_S = 0.1
"""As ten users who run `watch -n 1 gpulease status`."""
SCREEN = 50
DIFFERENT = 2_000
"""Jobs with a command each."""
LISTS = 5
MOST_P = 7.0
NEW_PLAN_S = 5.5
"""After this time there is a new plan, and with it new reasons why jobs wait."""
SETTLES_S = 3.0
_fork = multiprocessing.get_context("fork")
BESIDE = replace(NO_OP, claim=ClaimRequest(memory=10 * G, named=["7"]))
"""A job that starts at once, on the GPU for which the queue does not wait."""
WAITING = replace(
    NO_OP,
    claim=ClaimRequest(memory=80 * G, named=["0"]),
    queue=QueueRequest(array=f"1-{QUEUED}"),
)
AT_ONCE = 64
STARTS = replace(order("sleep", "600", memory=10 * G), queue=QueueRequest(array=f"1-{AT_ONCE}"))


def ask(path: Path, target: str) -> int:
    """Return the size of an answer, read as a whole from a new connection."""
    with closing(socket.socket(socket.AF_UNIX)) as link:
        link.connect(str(path))
        link.sendall(f"GET /v1{target} HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n".encode())
        return sum(iter(lambda: len(link.recv(1 << 20)), 0))


@contextlib.contextmanager
def full(*, queued: int) -> Iterator[Running]:
    """Run a daemon with a lease on each GPU but the last one, and jobs that wait for them."""
    with running() as daemon:
        client = daemon.client()
        for index in range(7):
            claim = ClaimRequest(memory=80 * G, named=[str(index)])
            client.submit(replace(order("sleep", "3600"), claim=claim))
        while client.status(queue=0).waiting:
            time.sleep(0.02)
        if queued:
            client.within(100).submit(WAITING)
        time.sleep(SETTLES_S)
        yield daemon
        for job in client.status(queue=0).jobs:
            client.cancel(job.id, grace=0)


def run() -> Iterator[Figure]:
    """Measure behind a long queue, in alternation with an empty one."""
    with full(queued=QUEUED) as long, full(queued=0) as short:
        ours, floor = paired(lambda: _status(long), lambda: _status(short), TIMES)
        what = f"gpulease status, {QUEUED} queued"
        yield Figure(what, ours * 1e3, "ms", 1.2, floor * 1e3, "none queued")
        taken = median(seconds(lambda: ask(long.socket, f"/jobs?limit={SCREEN}")) for _ in range(9))
        yield Figure(f"GET /jobs?limit={SCREEN}, {QUEUED} queued", taken * 1e3, "ms", 50.0)
        yield Figure("bytes of GET /status", ask(long.socket, "/status"), "bytes", 80_000)
        ours, floor = paired(
            lambda: ask(long.socket, "/metrics"), lambda: ask(long.socket, "/status?queue=0"), TIMES
        )
        what = f"GET /metrics, {QUEUED} queued"
        yield Figure(what, ours * 1e3, "ms", 1.0, floor * 1e3, "GET /status?queue=0")
        taken = median(seconds(lambda: ask(long.socket, "/jobs")) for _ in range(5))
        yield Figure(f"GET /jobs, all {QUEUED}", taken * 1e3, "ms", 600.0)
        yield from _beside_jobs(long)
    yield from _beside_starts()
    yield from _lists()


def _lists() -> Iterator[Figure]:
    with running() as daemon, occupied(daemon):
        client = daemon.client()
        for number in range(DIFFERENT):
            client.submit(order("python3", "train.py", "--seed", str(number)))
        time.sleep(SETTLES_S)
        for options in ((), ("--json",)):
            line = [sys.executable, "-m", "gpulease.cli", "list", *options]
            empty = [sys.executable, "-c", "pass"]
            pairs = []
            for _ in range(LISTS):
                time.sleep(NEW_PLAN_S)
                pairs.append((_cpu_s(line, daemon), _cpu_s(empty, daemon)))
            ours, floor = (median(each) for each in zip(*pairs, strict=True))
            what = f"CPU of {' '.join(['gpulease', *line[3:]])}, {DIFFERENT} commands, and daemon"
            yield Figure(what, ours * 1e3, "ms", MOST_P, floor * 1e3, "python -c pass")


def _cpu_s(line: list[str], daemon: Running) -> float:
    """Return the CPU time of a command and of the daemon meanwhile."""
    begun = daemon.cpu_s() + _children_s()
    subprocess.run(line, env=daemon.env, stdout=subprocess.DEVNULL, check=True)
    return daemon.cpu_s() + _children_s() - begun


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _status(daemon: Running) -> None:
    line = [sys.executable, "-m", "gpulease.cli", "status"]
    subprocess.run(line, env=daemon.env, stdout=subprocess.DEVNULL, check=True)


def _beside_jobs(daemon: Running) -> Iterator[Figure]:
    alone: list[float] = []
    polled: list[float] = []
    answers: list[float] = []
    ended = 0
    for _ in range(ROUNDS):
        alone.append(_rate(daemon, ended))
        with _poller(daemon.socket) as answered:
            polled.append(_rate(daemon, ended + JOBS))
        answers += answered
        ended += 2 * JOBS
    answers.sort()
    beside = f"while jobs start and end, {QUEUED} queued"
    late = answers[len(answers) * 99 // 100] * 1e3
    yield Figure(f"GET /status {beside}, 99th percentile", late, "ms", 50.0)
    yield Figure(
        f"jobs started and ended, {1 / ASKS_EVERY_S:.0f} statuses a second, {QUEUED} queued",
        median(polled), "jobs/s", 0.95, median(alone), "without them", higher_is_better=True,
    )  # fmt: skip


def _beside_starts() -> Iterator[Figure]:
    taken: dict[str, list[float]] = {"GET /status": [], "GET /jobs/ID": []}
    begun: list[float] = []
    with running() as daemon:
        client = daemon.client()
        for _ in range(ROUNDS * 2):
            at = time.perf_counter()
            array = client.submit(STARTS).id
            while any(job.state != "active" for job in client.elements(array)[-1:]):
                for what, target in zip(taken, ("/status", f"/jobs/{array}"), strict=True):
                    taken[what].append(seconds(lambda target=target: ask(daemon.socket, target)))
                time.sleep(0.01)
            begun.append(time.perf_counter() - at)
            for job in client.elements(array):
                client.cancel(job.id, grace=0)
            while client.status(queue=0).jobs:
                time.sleep(0.05)
    for what, answers in taken.items():
        answers.sort()
        beside = f"{what} while {AT_ONCE} jobs start at once"
        yield Figure(f"{beside}, median", median(answers) * 1e3, "ms", 20.0)
        late = answers[len(answers) * 99 // 100] * 1e3
        yield Figure(f"{beside}, 99th percentile", late, "ms", 50.0)
    yield Figure(f"until all {AT_ONCE} run", median(begun), "s", 1.0)


def _rate(daemon: Running, ended: int) -> float:
    begun = time.perf_counter()
    submit_all(daemon.socket, JOBS, BESIDE)
    until_ended(daemon, ended + JOBS)
    return JOBS / (time.perf_counter() - begun)


@contextlib.contextmanager
def _poller(path: Path) -> Iterator[list[float]]:
    """Ask for the status all the time in another process, and give the seconds of each answer."""
    ours, theirs = _fork.Pipe()
    process = _fork.Process(target=_poll, args=(path, theirs), daemon=True)
    process.start()
    answered: list[float] = []
    yield answered
    ours.send("enough")
    answered += ours.recv()
    process.join()


def _poll(path: Path, until: Connection) -> None:
    taken: list[float] = []
    while not until.poll(ASKS_EVERY_S):
        taken.append(seconds(lambda: ask(path, "/status")))
    until.send(taken)
