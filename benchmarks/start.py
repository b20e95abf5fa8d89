"""The start of a daemon that has served for a year, and what it costs afterwards."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.daemon import Running, running
from benchmarks.figures import Figure
from benchmarks.history import JOBS, write_year
from benchmarks.timing import seconds

MOST_S = 1.5
MOST_CPU_S = 1.0
AFTER_S = 180
LISTS = {("--limit", "100"): 0.2, ("--limit", "all"): 2.0}
"""The options of `list --all`, for a screen and for all, and the most seconds."""


def run() -> Iterator[Figure | str]:
    """Measure the time to the first answer, the CPU time after it, listings, and the end."""
    with tempfile.TemporaryDirectory(prefix="gpulease-year-") as name:
        state = Path(name, "state")
        yield f"{JOBS} jobs written in {seconds(lambda: write_year(state)):.0f} s"
        with running() as daemon:
            empty = daemon.cpu_s()
        begun = time.perf_counter()
        with running(state=state) as daemon:
            daemon.client().status()
            answered, at_start = time.perf_counter() - begun, daemon.cpu_s()
            yield Figure("start with a year of history, to the first answer", answered, "s", MOST_S)
            yield f"{at_start:.2f} s of CPU until then; a daemon without history {empty:.2f} s"
            time.sleep(AFTER_S)
            after = daemon.cpu_s() - at_start
            yield Figure(f"CPU in the {AFTER_S} s after it", after, "s", MOST_CPU_S)
            for options, most_s in LISTS.items():
                line = ["list", "--all", *options]
                taken = seconds(lambda line=line: _run(daemon, line))
                yield Figure(f"gpulease {' '.join(line)}, {JOBS} jobs", taken, "s", most_s)
            begun = time.perf_counter()
        yield f"the end takes {time.perf_counter() - begun:.2f} s"


def _run(daemon: Running, line: list[str]) -> None:
    command = [sys.executable, "-m", "gpulease.cli", *line]
    subprocess.run(command, env=daemon.env, stdout=subprocess.DEVNULL, check=True)
