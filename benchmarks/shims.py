"""Shims: from the request to the job's first code, CPU for each job, and memory.

Beside them a small Python process starts the same program by fork and exec. The daemon takes no
part.
"""

import asyncio
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure
from benchmarks.processes import ProcessGroup, add, control_group, pss_mib
from gpulease.domain.job import Invocation
from gpulease.host.launch import Launch
from gpulease.host.launcher import Launcher
from gpulease.shim.launch_request import ShimSpec
from gpulease.shim.record import is_alive, read_record

JOBS = 200
_FORKS = """
import os, sys
while os.read(0, 1):
    if os.fork() == 0:
        os.execv("/bin/sh", sys.argv[1:])
    os.wait()
"""
"""Starts its arguments for each byte of its input."""
WANTED_RATIO, WANTED_CPU_MS, WANTED_PSS_MIB = 4.0, 3.0, 2.5


class Signal:
    """A pipe by which a program says that its first code runs."""

    def __init__(self, folder: Path) -> None:
        path = folder / "first"
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.command = ("/bin/sh", "-c", f"echo >{path}")

    async def seconds(self, start: Callable[[], Awaitable[object]]) -> float:
        """Return the time from `start` to the program's first code."""
        begun = time.perf_counter()
        started = asyncio.ensure_future(start())
        while not select.select([self._fd], (), (), 0)[0]:
            await asyncio.sleep(0)
        taken = time.perf_counter() - begun
        os.read(self._fd, 1)
        await started
        return taken


def launch_of(directory: Path, *argv: str) -> Launch:
    shim = ShimSpec(
        job=1, directory=str(directory), identity=None, stdin=False, awaits_attach=False,
        time_limit_s=None, grace_s=30, log_limit=1 << 20,
    )  # fmt: skip
    return Launch(shim, Invocation(argv, "/", {"PATH": "/usr/bin:/bin"}))


@contextmanager
def forking(command: tuple[str, ...]) -> Iterator[Callable[[], Awaitable[None]]]:
    """Start the small process; yield what makes it start the command."""
    small = [sys.executable, "-I", "-S", "-c", _FORKS, *command]
    with subprocess.Popen(small, stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        given = process.stdin

        async def start() -> None:
            given.write(b"x")

        yield start
        given.close()


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="gpulease-bench-") as name:
        yield from asyncio.run(_measured(Path(name)))


async def _measured(folder: Path) -> list[Figure]:
    launcher, first = Launcher(), Signal(folder)
    places = iter(_place(folder / str(number)) for number in range(2 * JOBS + 2))
    shim = (await launcher.launch(launch_of(next(places), "/bin/sleep", "1000"))).shim_pid
    ours, plain = [], []
    with forking(first.command) as start:
        for _ in range(JOBS):
            job = launch_of(next(places), *first.command)
            ours.append(await first.seconds(lambda job=job: launcher.launch(job)))
            await _gone(Path(job.shim.directory))
            plain.append(await first.seconds(start))
    figures = [
        Figure(
            "from a request to the spawner to the job's first code", median(ours) * 1e3, "ms",
            WANTED_RATIO, median(plain) * 1e3, "fork and exec by a small Python process",
        ),
        Figure("memory of a shim (PSS)", pss_mib(shim), "MiB", WANTED_PSS_MIB),
    ]  # fmt: skip
    figures += await _cpu(launcher, shim, places)
    await launcher.close()
    _end(folder / "0")
    return figures


async def _cpu(launcher: Launcher, shim: int, places: Iterator[Path]) -> list[Figure]:
    """Measure the CPU time of the spawner and its shims, where a control group can be made."""
    with control_group(f"gpulease-bench-{os.getpid()}") as group:
        if group is None:
            return []
        spawner = int(Path(f"/proc/{shim}/stat").read_text().rpartition(")")[2].split()[1])
        add(spawner, group)
        for _ in range(8):  # the stock is older than the group
            await _run_job(launcher, next(places))
        begun, jobs = ProcessGroup(shim, group).cpu_s(), JOBS - 8
        for _ in range(jobs):
            await _run_job(launcher, next(places))
        used = (ProcessGroup(shim, group).cpu_s() - begun) * 1e3 / jobs
        await launcher.close()
        while (group / "cgroup.procs").read_text():
            await asyncio.sleep(0.01)
    return [
        Figure("CPU of spawner and shim for a job that does nothing", used, "ms", WANTED_CPU_MS)
    ]


async def _run_job(launcher: Launcher, directory: Path) -> None:
    await launcher.launch(launch_of(directory, "/usr/bin/true"))
    await _gone(directory)


async def _gone(directory: Path) -> None:
    while is_alive(directory):
        await asyncio.sleep(0.001)


def _place(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _end(directory: Path) -> None:
    record = read_record(directory)
    if record is not None and record.started is not None:
        os.kill(record.started.pid, 9)
