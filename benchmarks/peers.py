"""Other queues in the same run: empty jobs from the submission of the first to the end of all.

Each is measured where it is installed: task-spooler, and huey in the environment of the Python that
GPULEASE_BENCH_HUEY names. Neither leases GPU memory.
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
_HUEY = "GPULEASE_BENCH_HUEY"
_HUEY_WITHIN_S = 60
_HUEY_RUN = """
import os, sys, time
from huey import SqliteHuey
huey = SqliteHuey(filename=sys.argv[1], fsync=True)

@huey.task()
def empty():
    return True

huey.create_consumer(workers=int(sys.argv[2]), periodic=False, initial_delay=0.01).start()
begun = time.perf_counter()
for result in [empty() for _ in range(int(sys.argv[3]))]:
    result.get(blocking=True, max_delay=0.02)
print(time.perf_counter() - begun, flush=True)
os._exit(0)  # the threads of the consumer would go on
"""


def run() -> Iterator[str]:
    """Measure what is installed, and name what is not."""
    peers = (
        ("task-spooler", shutil.which("tsp"), _task_spooler),
        ("huey", os.environ.get(_HUEY), _huey),
    )
    for name, program, measure in peers:
        if not program:
            yield f"{name}: not installed"
            continue
        with tempfile.TemporaryDirectory(prefix="gpulease-peers-") as folder:
            for line in measure(Path(folder)):
                yield f"{name}: {line}"


def _rate(taken_s: float) -> str:
    return f"{JOBS / taken_s:.0f} empty jobs a second, {AT_ONCE} at once"


def _task_spooler(folder: Path) -> Iterator[str]:
    """Measure a queue for one user, in memory."""
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


def _huey(folder: Path) -> Iterator[str]:
    """Measure a queue of Python calls in SQLite, with synced commits."""
    done = subprocess.run(
        [os.environ[_HUEY], "-c", _HUEY_RUN, str(folder / "huey.db"), str(AT_ONCE), str(JOBS)],
        check=True, stdout=subprocess.PIPE, text=True, timeout=_HUEY_WITHIN_S,
    )  # fmt: skip
    yield f"{_rate(float(done.stdout))}: calls in threads, no processes"
