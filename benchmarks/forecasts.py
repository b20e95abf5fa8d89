"""How far expected starts can be believed: `python -m benchmarks.forecasts [--quick]`.

Replays of the traces of `benchmarks.scheduling` and of the month of a made-up lab. Of the jobs that
wait when they are submitted, some are predicted at once, as `gpulease run` shows it: how many start
within the range, how often "within the hour" holds, how wide ranges are, and how large the median
error is against that of a forward run by the means of run times. GPULEASE_TRACES names the
directory with the traces.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from benchmarks.scheduling import LIMITS, File, draw
from gpulease.domain.forecast import Start, forecast, run_ahead
from gpulease.domain.plan import order_after
from gpulease.domain.queue_options import QueuePolicy
from gpulease.replay.engine import Moment, replay
from gpulease.replay.trace import Server, TraceJob, read_trace
from gpulease.units import GIB

HOUR = timedelta(hours=1)
COVERED = 0.60
"""The part of the starts that has to fall in their ranges, on each set."""
ERROR = 0.85
"""The median error, at most, against that of a run by means, as the mean over the sets."""
LAB = Path(__file__).parents[1] / "examples" / "lab_month.py"


@dataclass(frozen=True, slots=True)
class Shown:
    """What was predicted for one job, and what happened."""

    left: timedelta
    """The time from the prediction to the start."""
    expected: timedelta
    by_means: timedelta | None
    in_range: bool
    width: float | None
    """The end of the range over its beginning; None if it begins at once."""
    within_hour: bool
    """The range ends within the hour."""


class Submissions:
    """Observes a replay, and predicts the starts of some jobs that wait once they are submitted."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._seen = set[int]()
        self._starts: dict[int, tuple[float, datetime, Start, Start | None]] = {}
        self.took_s = 0.0
        self.by_means_took_s = 0.0

    def __call__(self, moment: Moment) -> None:
        """Predict, if one of the chosen jobs is new."""
        waiting = {job.id for job in moment.snapshot.jobs if not job.holds_memory}
        new = waiting - self._seen
        self._seen |= new
        asked = [
            job
            for job in new - dict(moment.plan.grants).keys()
            if draw(f"ask{job}") % self._every == 0
        ]
        if not asked:
            return
        decided = replace(moment.plan, snapshot=replace(moment.snapshot, queue=None))
        order, begun_s = order_after(decided), time.thread_time()
        starts = forecast(decided, order)
        between_s = time.thread_time()
        by_means = run_ahead(decided, order, moment.snapshot.history)
        self.took_s += between_s - begun_s
        self.by_means_took_s += time.thread_time() - between_s
        self._starts |= {
            job: (moment.at_s, moment.snapshot.at, starts[job], by_means.get(job))
            for job in asked
            if job in starts
        }

    def shown(self, started_s: dict[int, float]) -> list[Shown]:
        """Compare the predictions with the starts."""
        found = []
        for job, (at_s, now, start, by_means) in self._starts.items():
            left = timedelta(seconds=started_s[job] - at_s)
            found.append(
                Shown(
                    left,
                    start.at - now,
                    None if by_means is None else by_means.at - now,
                    start.earliest <= now + left <= start.latest,
                    (start.latest - now) / (start.earliest - now) if start.earliest > now else None,
                    start.latest <= now + HOUR,
                )
            )
        return found


@dataclass(frozen=True, slots=True)
class Source:
    """A trace, and how many of its jobs are predicted: one of `every`."""

    name: str
    every: int
    file: File | None = None

    def read(self) -> tuple[Sequence[TraceJob], Sequence[Server]]:
        if self.file is not None:
            return self.file.trace(), self.file.servers
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            subprocess.run([sys.executable, LAB], check=True, stdout=file)
            return read_trace(Path(file.name)).jobs, [Server(4, 24 * GIB)]


Predicted = tuple[list[Shown], float, float]


def predict(source: Source) -> Predicted:
    """Return what was predicted in a replay, and what that and a run by means cost, in seconds."""
    jobs, servers = source.read()
    submissions = Submissions(source.every)
    runs = replay(jobs, servers, QueuePolicy(), observe=submissions)
    shown = submissions.shown({run.job.id: run.start_s for run in runs})
    return shown, submissions.took_s, submissions.by_means_took_s


def sources(quick: bool) -> list[Source]:
    """Return all traces; those of one set have one name."""
    parts = range(1 if quick else 3)
    return [
        *(
            Source(f"6x8, limits: {limits}", 20 if quick else 10, File(0, limits=limits))
            for limits in LIMITS
        ),
        *(
            Source(f"1x8, limits: {limits}", 4, File(0, part, limits=limits))
            for limits in LIMITS
            for part in parts
        ),
        Source("lab month, 4 GPUs", 1),
    ]


def main(arguments: Sequence[str]) -> int:
    """Print a line for each set, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer jobs and files")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    if "GPULEASE_TRACES" not in os.environ:
        sys.exit("GPULEASE_TRACES names no directory with the traces")
    todo = sources(options.quick)
    titles = f"{'jobs':>6}{'in range':>10}{'the hour':>14}{'high/low':>10}"
    print(" " * 24 + titles + f"{'error':>9}{'by means':>10}{'ratio':>7}")
    sets: dict[str, list[Shown]] = {}
    took_s = by_means_s = 0.0
    with ProcessPoolExecutor(options.processes) as executor:
        for source, (shown, one_s, other_s) in zip(todo, executor.map(predict, todo), strict=True):
            sets.setdefault(source.name, []).extend(shown)
            took_s, by_means_s = took_s + one_s, by_means_s + other_s
    covered, ratios = [], []
    for name, all_shown in sets.items():
        in_range = statistics.fmean(each.in_range for each in all_shown)
        hour = [each.left <= HOUR for each in all_shown if each.within_hour]
        held = f"{statistics.fmean(hour):.0%} of {len(hour)}" if hour else "not said"
        widths = [each.width for each in all_shown if each.width is not None]
        width = f"{statistics.median(widths):.1f}" if widths else "from now"
        both = [(each, each.by_means) for each in all_shown if each.by_means is not None]
        error = statistics.median(abs(each.left - each.expected) for each, _ in both) / HOUR
        means = statistics.median(abs(each.left - other) for each, other in both) / HOUR
        covered.append(in_range)
        ratios.append(error / means)
        print(
            f"{name:24}{len(all_shown):6}{in_range:10.0%}{held:>14}{width:>10}"
            f"{error:7.2f} h{means:8.2f} h{error / means:7.2f}"
        )
    reached = min(covered) >= COVERED, statistics.fmean(ratios) <= ERROR
    verdicts = ["reached" if each else "MISSED" for each in reached]
    print(f"in range on each set {min(covered):.0%} >= {COVERED:.0%}  {verdicts[0]}")
    print(f"mean ratio of errors {statistics.fmean(ratios):.2f} <= {ERROR}  {verdicts[1]}")
    print(f"a forecast takes {took_s / by_means_s:.2f} times as long as a run by means")
    return int(not all(reached))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
