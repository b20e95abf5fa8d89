"""Answers about a year of history: 8 GPUs and 200,000 jobs."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from statistics import median
from urllib.request import urlopen

from benchmarks.answers import ask
from benchmarks.daemon import Running, running
from benchmarks.figures import Figure
from benchmarks.history import GPUS, JOBS, write_year
from benchmarks.timing import seconds
from benchmarks.web import serving
from gpulease.config import DATABASE_NAME
from gpulease.wire.history import MOST_POINTS

MOST_S = 0.5
TIMES = 5
MOST_MB = 80
_DAY_S = 86400
_MONTH_S, _YEAR_S = 30 * _DAY_S, 365 * _DAY_S
_SPANS_S = {"hour": 3600, "day": _DAY_S, "week": 7 * _DAY_S, "year": _YEAR_S}
_TARGETS = {
    **{
        f"a GPU over a {name}": f"/gpus/0/history?since={span}&points={MOST_POINTS}"
        for name, span in _SPANS_S.items()
    },
    "the memory of the last job": f"/jobs/{JOBS}/memory?points={MOST_POINTS}",
    "the memory of an old job": f"/jobs/{JOBS // 2}/memory?points={MOST_POINTS}",
    "a page of history": "/history?limit=1000",
    "a page of history since 30 days": f"/history?limit=1000&since={_MONTH_S}",
    "a page of a user's history": "/history?limit=1000&user=user7",
    "the report of 30 days": f"/report?since={_MONTH_S}",
    "the report of all time": "/report",
    "the shares": "/shares",
    "the status": "/status",
    "all jobs, the first page": "/jobs?all=true&limit=100",
}
_PAGES = (
    "/", "/jobs", "/past", f"/jobs/{JOBS}", f"/jobs/{JOBS // 2}",
    *(f"/gpus/0?span={name}" for name in _SPANS_S),
    *(f"/people?span={name}" for name in ("day", "month", "year")),
    "/health",
)  # fmt: skip
_COMMANDS = (("history", "--since", "30d"), ("report", "--all"), ("status",))
_RUNS = 3


def run() -> Iterator[Figure | str]:
    """Measure each answer that a page or a command shows, from the request to its last byte."""
    with tempfile.TemporaryDirectory(prefix="gpulease-year-") as name:
        state = Path(name, "state")
        yield f"{JOBS} jobs on {GPUS} GPUs written in {seconds(lambda: write_year(state)):.0f} s"
        yield from _sizes(state / DATABASE_NAME)
        with running(f"{GPUS}x80G", state=state) as daemon:
            yield from _answers(daemon)
            yield from _commands(daemon)
            with serving(daemon.socket) as (_, port):
                yield from _pages(port)


def _sizes(database: Path) -> Iterator[Figure | str]:
    yield f"the database has {database.stat().st_size / 1e6:.0f} MB"
    with closing(connect(database)) as connection:
        for table in ("job_memory", "gpu_memory"):
            query = "SELECT sum(pgsize) FROM dbstat WHERE name = ?"
            (size,) = connection.execute(query, (table,)).fetchone()
            yield Figure(f"a year of history: {table}", size / 1e6, "MB", MOST_MB)


def _answers(daemon: Running) -> Iterator[Figure | str]:
    for what, target in _TARGETS.items():
        before = daemon.cpu_s()
        taken = [seconds(lambda at=target: ask(daemon.socket, at)) for _ in range(TIMES)]  # type: ignore[misc]
        used = (daemon.cpu_s() - before) / TIMES
        yield Figure(f"a year of history: {what}", median(taken), "s", MOST_S)
        yield f"{ask(daemon.socket, target)} bytes; {used:.3f} s of CPU in the daemon"


def _pages(port: int) -> Iterator[Figure]:
    """Measure pages of the web server that nobody has asked for yet."""
    for page in _PAGES:
        with urlopen(f"http://127.0.0.1:{port}/static/style.css"):
            pass  # the server is warm
        taken = seconds(lambda at=page: urlopen(f"http://127.0.0.1:{port}{at}").read())  # type: ignore[misc]
        yield Figure(f"a year of history: the page {page}", taken, "s", MOST_S)


def _commands(daemon: Running) -> Iterator[Figure]:
    for words in _COMMANDS:
        both = [_times(daemon, words) for _ in range(_RUNS)]
        what = f"a year of history: gpulease {' '.join(words)}"
        yield Figure(f"{what}, first line", median(first for first, _ in both), "s", MOST_S)
        yield Figure(f"{what}, all lines", median(last for _, last in both), "s", MOST_S)


def _times(daemon: Running, words: Sequence[str]) -> tuple[float, float]:
    """Return the seconds from the start of a command to its first line, and to its end."""
    line = [sys.executable, "-m", "gpulease.cli", *words]
    begun = time.perf_counter()
    with subprocess.Popen(line, env=daemon.env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - begun
        process.stdout.read()
    return first, time.perf_counter() - begun
