"""task-spooler in the same run, where it is installed: empty jobs until all have ended.

It keeps its queue in memory, for one user, and leases no memory of GPUs.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.timing import paired, seconds

JOBS = 300
AT_ONCE = 8


def run() -> Iterator[str]:
    """Measure task-spooler if it is installed."""
    if shutil.which("tsp") is None:
        yield "task-spooler: not installed"
        return
    with tempfile.TemporaryDirectory(prefix="gpulease-peers-") as folder:
        for line in _task_spooler(Path(folder)):
            yield f"task-spooler: {line}"


def _rate(taken_s: float) -> str:
    return f"{JOBS / taken_s:.0f} empty jobs a second, {AT_ONCE} at once"


def _task_spooler(folder: Path) -> Iterator[str]:
    env = {**os.environ, "TS_SOCKET": str(folder / "socket"), "TMPDIR": str(folder)}

    def tsp(*arguments: str) -> None:
        subprocess.run(["tsp", *arguments], env=env, check=True, stdout=subprocess.DEVNULL)

    tsp("-S", str(AT_ONCE))
    try:

        def all_jobs() -> None:
            for _ in range(JOBS):
                tsp("-n", "true")
            tsp("-N", str(AT_ONCE), "-n", "true")  # needs all slots, so it is the last
            tsp("-w")

        yield _rate(seconds(all_jobs))
        yield f"a job in the foreground takes {_in_p(lambda: tsp('-nf', 'true'))}"
    finally:
        tsp("-K")


def _in_p(call: Callable[[], object]) -> str:
    ours, python = paired(
        call, lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), 15
    )
    return f"{ours * 1e3:.0f} ms, {ours / python:.2f} p"
