"""Draw a replay beside EASY and FIFO: `python -m benchmarks.replay_plot TRACE SERVERS FILE.png`.

How long jobs waited, and how many GPUs held jobs over time.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from gpulease.replay.results import Result, Settings, baselines, compare
from gpulease.replay.trace import Run, Server, parse_servers, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#000000")
"""Of Okabe and Ito, "Color Universal Design": they differ for people who are colour-blind."""
_STYLES = ("-", "--", ":")
_HOUR_S, _DAY_S = 3600.0, 86400.0
_TICKS = {0: "0", 1 / 60: "1 min", 1 / 6: "10 min", 1: "1 h", 10: "10 h", 100: "100 h"}
"""Of the waits, in hours."""
_POINTS = 1000
"""The figure is about as many pixels wide."""


def plot(path: Path, results: Sequence[Result], servers: Sequence[Server]) -> None:
    """Draw the waits and the GPUs in use of each replay into a file."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    waits, gpus = figure.subplots(2, 1)
    for result, colour, style in zip(results, _COLOURS, _STYLES, strict=False):
        look = {"color": colour, "linestyle": style, "label": result.settings.name}
        hours = sorted(run.wait_s / _HOUR_S for run in result.runs)
        waits.plot(hours, [100 * n / len(hours) for n in range(1, len(hours) + 1)], **look)
        days, busy = _means(in_use(result.runs))
        gpus.plot(days, busy, linewidth=1, **look)
    _label_waits(waits)
    _label_gpus(gpus, sum(server.gpus for server in servers))
    figure.savefig(path, dpi=120)


def _label_waits(axes: "Axes") -> None:
    # Linear to one minute: half of the jobs may wait for no time at all.
    axes.set_xscale("symlog", linthresh=1 / 60)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    axes.set_xticks(
        [0, 1 / 60, 1 / 6, 1, 10, 100], ["0", "1 min", "10 min", "1 h", "10 h", "100 h"]
    )
    axes.set_title("How long jobs waited")
    axes.set_xlabel("wait")
    axes.set_ylabel("% of jobs that waited no longer")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _label_gpus(axes: "Axes", count: int) -> None:
    axes.set_ylim(0, count * 1.05)
    axes.set_title(f"GPUs that held jobs, of {count}")
    axes.set_xlabel("days since the first start")
    axes.set_ylabel("GPUs")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def in_use(runs: Iterable[Run]) -> list[tuple[float, int]]:
    """Return the GPUs that hold at least one job, at each instant at which that changes."""
    changes = [
        ((at, step), (run.server, gpu))
        for run in runs
        for gpu in run.gpus
        for at, step in ((run.start_s, 1), (run.end_s, -1))
        if run.end_s > run.start_s
    ]
    jobs_on: dict[tuple[int, int], int] = {}
    busy: list[tuple[float, int]] = []
    for (at, step), gpu in sorted(changes):
        jobs_on[gpu] = jobs_on.get(gpu, 0) + step
        if not jobs_on[gpu]:
            del jobs_on[gpu]
        if busy and busy[-1][0] == at:
            busy.pop()
        busy.append((at, len(jobs_on)))
    return busy


def _means(busy: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """Return the means over equal spans, each with the days since the first instant."""
    if len(busy) < 2:
        return [], []
    first, last = busy[0][0], busy[-1][0]
    step = (last - first) / _POINTS
    sums = [0.0] * _POINTS
    for (begin, count), (end, _) in pairwise(busy):
        for place in range(
            int((begin - first) / step), min(int((end - first) / step) + 1, _POINTS)
        ):
            from_, to = first + place * step, first + (place + 1) * step
            sums[place] += max(0.0, min(end, to) - max(begin, from_)) * count
    return [place * step / _DAY_S for place in range(_POINTS)], [each / step for each in sums]


def main(trace: str, servers: str, path: str) -> None:
    """Replay a trace under the fair order, EASY and FIFO, and draw what happened."""
    machines, asked = parse_servers(servers), Settings()
    jobs = read_trace(Path(trace)).jobs
    plot(Path(path), compare(jobs, machines, [asked, *baselines(asked)]), machines)


if __name__ == "__main__":
    main(*sys.argv[1:])
