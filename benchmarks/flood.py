"""The response times for one user while another floods the daemon, compared with no flood.

`python -m benchmarks.flood [NAME...]`, as root: the kernel tells the daemon which user is calling.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.daemon import QUEUED, G, Running, order, running
from benchmarks.timing import seconds
from gpulease.client import Client
from gpulease.errors import GpuleaseError

FLOODER, OTHER = 54_321, 54_322
"""Users without a passwd entry: their jobs are never launched."""
PROCESSES = 4
CONNECTIONS = 2000
SLOW_BODIES = 900
MEASURED_S = 6.0
SETTLES_S = 1.5
PATIENCE_S = 30.0
_fork = multiprocessing.get_context("fork")
_SLOW_HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: g\r\nContent-Length: 6000000\r\n\r\n"


def submit(path: Path) -> None:
    wanted = order("true")
    while True:
        with contextlib.suppress(GpuleaseError):
            Client(path).submit(wanted)


def submit_in_vain(path: Path) -> None:
    wanted = order("true", memory=1000 * G)
    while True:
        with contextlib.suppress(GpuleaseError):
            Client(path).submit(wanted)


def submit_much(path: Path) -> None:
    wanted = order("true")
    wanted.environment = {f"A{n}": os.urandom(50_000).hex() for n in range(20)}
    while True:
        with contextlib.suppress(GpuleaseError):
            Client(path).submit(wanted)


def ask(path: Path) -> None:
    while True:
        with contextlib.suppress(GpuleaseError):
            Client(path).status_json()


def list_all(path: Path) -> None:
    while True:
        with contextlib.suppress(GpuleaseError):
            Client(path).jobs_json(everything=True)


def connect(path: Path) -> None:
    """Hold as many connections as possible, and keep opening more."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            held.append(_connected(path))
        del held[: -CONNECTIONS // PROCESSES]


def talk_nonsense(path: Path) -> None:
    while True:
        with contextlib.suppress(OSError), _connected(path) as link:
            link.sendall(os.urandom(65536))
            link.recv(4096)


def trickle(path: Path) -> None:
    """Send endless bodies, one byte at a time."""
    held: list[socket.socket] = []
    while True:
        while len(held) < SLOW_BODIES // PROCESSES:
            with contextlib.suppress(OSError):
                link = _connected(path)
                link.sendall(_SLOW_HEAD)
                held.append(link)
        for link in list(held):
            try:
                link.sendall(b"x")
            except OSError:
                link.close()
                held.remove(link)
        time.sleep(0.1)


def burn(path: Path) -> None:
    """Only use CPU time, as the other floods also do."""
    del path
    while True:
        pass


FLOODS: dict[str, tuple[Callable[[Path], None], int]] = {
    "processors only": (burn, 0),
    "submissions": (submit, 0),
    "refused submissions": (submit_in_vain, 0),
    "submissions of 2M": (submit_much, 0),
    f"{CONNECTIONS} connections": (connect, 0),
    "garbage": (talk_nonsense, 0),
    "slow bodies": (trickle, 0),
    f"status, {QUEUED} waiting": (ask, QUEUED),
    f"list --all, {QUEUED} jobs": (list_all, QUEUED),
    f"submissions, {QUEUED} waiting": (submit, QUEUED),
}
"""Each flood, and the number of the flooder's queued jobs before it begins."""


def run(names: list[str] | None = None) -> Iterator[str]:
    """Measure each flood with a new daemon."""
    if os.geteuid() != 0:
        yield "left out: it takes root to be two users"
        return
    for name, (flood, waiting) in FLOODS.items():
        if names and not any(name.startswith(each) for each in names):
            continue
        with running() as daemon:
            open_to_all(daemon.socket)
            fill(daemon, waiting)
            yield f"{name}: {compared(daemon, flood)}"


def open_to_all(path: Path) -> None:
    path.parent.chmod(0o711)


def fill(daemon: Running, waiting: int) -> None:
    """Lease all GPUs, and queue the flooder's jobs for them."""
    for _ in range(8):
        daemon.client().submit(order("sleep", "3600", memory=80 * G))
    if waiting:
        with _as_user(FLOODER, lambda: _submit_many(daemon.socket, waiting)) as process:
            process.join()


def _submit_many(path: Path, count: int) -> None:
    wanted = order("true")
    for _ in range(count):
        Client(path).submit(wanted)


def compared(daemon: Running, flood: Callable[[Path], None]) -> str:
    alone = measured(daemon.socket)
    with contextlib.ExitStack() as stack:
        for _ in range(PROCESSES):
            stack.enter_context(_as_user(FLOODER, lambda: flood(daemon.socket)))
        time.sleep(SETTLES_S)
        flooded = measured(daemon.socket)
    parts = [
        f"{verb} {_told(alone[verb])}, flooded {_told(flooded[verb])}, "
        f"{statistics.median(flooded[verb]) / statistics.median(alone[verb]):.1f} times"
        for verb in alone
    ]
    return "; ".join(parts) + f"; resident {daemon.resident_mib():.0f} MiB"


def _told(taken: list[float]) -> str:
    return f"{statistics.median(taken) * 1e3:.0f} ms (at worst {max(taken) * 1e3:.0f})"


def measured(path: Path) -> dict[str, list[float]]:
    """Return the seconds of each call of the other user; infinity for a failed one."""
    ours, theirs = _fork.Pipe()
    with _as_user(OTHER, lambda: _measure(path, theirs)):
        taken: dict[str, list[float]] = ours.recv()
    return taken


def _measure(path: Path, to: Connection) -> None:
    client, wanted = Client(path, answer_within=PATIENCE_S), order("true")
    taken: dict[str, list[float]] = {"status": [], "run -d": []}
    begun = time.perf_counter()
    while time.perf_counter() - begun < MEASURED_S or len(taken["status"]) < 3:
        taken["status"].append(_patient(client.status_json))
        taken["run -d"].append(_patient(lambda: client.submit(wanted)))
        time.sleep(0.02)
    to.send(taken)


def _patient(call: Callable[[], object]) -> float:
    try:
        return seconds(call)
    except GpuleaseError as error:
        sys.stderr.write(f"    not served: {error.message}\n")
        return PATIENCE_S


@contextlib.contextmanager
def _as_user(uid: int, call: Callable[[], None]) -> Iterator[multiprocessing.process.BaseProcess]:
    def become() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        call()

    process = _fork.Process(target=become, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _connected(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(10)
    try:
        link.connect(str(path))
    except OSError:
        link.close()
        raise
    return link


if __name__ == "__main__":
    for each in run(sys.argv[1:]):
        print(each, flush=True)
