"""A daemon for a benchmark, and jobs for it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ProcessGroup, add, control_group
from gpulease.client import Client
from gpulease.wire.requests import ClaimRequest, SubmitRequest

G = 1024**3
QUEUED = 10_000
GPUS = "8x80G"


@dataclass
class Running:
    """A daemon with its spawner, its shims and their jobs."""

    pid: int
    socket: Path
    env: dict[str, str]
    """For commands that use this daemon."""
    processes: ProcessGroup

    def client(self) -> Client:
        return Client(self.socket)

    def cpu_s(self) -> float:
        """Return the CPU time of all processes, also of those that have ended."""
        return self.processes.cpu_s()

    def pss_mib(self) -> float:
        """Return the memory of all processes."""
        return self.processes.pss_mib()

    def resident_mib(self) -> float:
        """Return the memory of the daemon alone."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextlib.contextmanager
def running(simulate: str = GPUS, *options: str, state: Path | None = None) -> Iterator[Running]:
    """Run a daemon until its socket is there; in `state`, or in a directory that is removed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-bench-")))
        group = stack.enter_context(control_group(folder.name))
        path, log = folder / "s", folder / "log"
        command = [sys.executable, "-m", "gpulease.daemon", "--simulate", simulate]
        command += ["--socket", str(path), "--state", str(state or folder / "state"), *options]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            add(process.pid, group)
        try:
            while not _listens(path):
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.005)
            env = {**os.environ, "GPULEASE_SOCKET": str(path)}
            yield Running(process.pid, path, env, ProcessGroup(process.pid, group))
        finally:
            process.terminate()
            process.wait()
            if group is not None:  # jobs outlive their daemon
                for pid in ProcessGroup(process.pid, group).pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(str(path)) == 0


def order(*argv: str, memory: int = G) -> SubmitRequest:
    environment = {name: value for name, value in os.environ.items() if value.isascii()}
    return SubmitRequest(list(argv), "/", environment, claim=ClaimRequest(memory=memory))


@contextlib.contextmanager
def occupied(daemon: Running) -> Iterator[None]:
    """Lease all GPUs, so that what is submitted stays queued."""
    client = daemon.client()
    holders = [client.submit(order("sleep", "3600", memory=80 * G)).id for _ in range(8)]
    while any(client.job(each).state != "active" for each in holders):
        time.sleep(0.02)
    try:
        yield
    finally:
        for each in holders:
            client.cancel(each, grace=0)


def queue(daemon: Running, count: int = QUEUED) -> None:
    """Queue jobs, while all GPUs are leased."""
    wanted = order("true")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: daemon.client().submit(wanted), range(count)))
