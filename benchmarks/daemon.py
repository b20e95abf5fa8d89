"""The daemon: memory and CPU when idle, the time of a submission and of a launch."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import seconds
from gpulease.client import Client
from gpulease.wire.requests import ClaimRequest, SubmitRequest

G = 1024**3
IDLE_S = 60
QUEUED = 10_000
JOBS = 300
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Running:
    """A daemon for one benchmark."""

    pid: int
    socket: Path
    env: dict[str, str]

    def client(self) -> Client:
        return Client(self.socket)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def resident_mib(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextlib.contextmanager
def running(simulate: str = "8x80G") -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="gpulease-bench-") as name:
        socket = Path(name) / "s"
        command = [sys.executable, "-m", "gpulease.daemon", "--simulate", simulate]
        command += ["--socket", str(socket), "--state", f"{name}/state"]
        with (Path(name) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not socket.exists():
                if process.poll() is not None:
                    sys.exit((Path(name) / "log").read_text())
                time.sleep(0.05)
            yield Running(process.pid, socket, {**os.environ, "GPULEASE_SOCKET": str(socket)})
        finally:
            process.terminate()
            process.wait()


def order(*argv: str, memory: int = G) -> SubmitRequest:
    environment = {name: value for name, value in os.environ.items() if value.isascii()}
    return SubmitRequest(list(argv), "/", environment, claim=ClaimRequest(memory=memory))


def footprint() -> Iterator[str]:
    """Measure memory after the start, and CPU time in an idle minute."""
    with running() as daemon:
        time.sleep(3)
        begun = daemon.cpu_s()
        time.sleep(IDLE_S)
        used = daemon.cpu_s() - begun
        yield f"resident memory {daemon.resident_mib():.0f} MiB"
        yield f"idle for {IDLE_S} s: {used:.2f} s of CPU, {used / IDLE_S * 100:.2f} % of one core"


def submissions() -> Iterator[str]:
    """Measure a submission with an empty queue, and with 10,000 queued jobs."""
    with running() as daemon, contextlib.ExitStack() as stack:
        del stack
        client = daemon.client()
        for _ in range(8):
            client.submit(order("sleep", "3600", memory=80 * G))
        while any(job.state != "active" for job in client.status().jobs):
            time.sleep(0.02)
        wanted = order("true")
        first = sorted(seconds(lambda: client.submit(wanted)) for _ in range(50))[25]
        with ThreadPoolExecutor(4) as pool:
            total = seconds(
                lambda: list(pool.map(lambda _: daemon.client().submit(wanted), range(QUEUED)))
            )
        last = sorted(seconds(lambda: client.submit(wanted)) for _ in range(50))[25]
        yield f"{QUEUED} jobs queued in {total:.0f} s, {QUEUED / total:.0f} a second"
        yield (
            f"one submission: {first * 1e3:.1f} ms on an empty queue, {last * 1e3:.1f} ms on a "
            f"full one, {last / first:.2f} times"
        )
        listing = seconds(client.status)
        yield f"status with all of them: {listing:.2f} s; resident {daemon.resident_mib():.0f} MiB"
        for job in client.status().jobs:
            if job.state != "queued":
                client.cancel(job.id)


def launches() -> Iterator[str]:
    """Measure empty jobs from submission to end, compared with starting as many processes."""
    with running() as daemon:
        wanted = order("true")
        begun = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: daemon.client().submit(wanted), range(JOBS)))
        client = daemon.client()
        while client.status().jobs:
            time.sleep(0.02)
        ours = time.perf_counter() - begun
        plain = seconds(lambda: [subprocess.run(["true"], check=True) for _ in range(JOBS)])
        yield (
            f"{JOBS} jobs: {JOBS / ours:.0f} a second, each at the price of "
            f"{ours / plain:.1f} plain processes"
        )
