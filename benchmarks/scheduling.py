"""How long jobs wait under the queue's policy: `python -m benchmarks.scheduling [--quick]`.

`--ablate` prints what the goals' figures are worth to each number of the policy instead.

Goals G3 to G10. Most are replays of a month of the Philly trace, with the memory of its one-GPU
jobs drawn from the openb trace. `6x8` is that month on six servers of 8 GPUs, `1x8` a sixth of its
jobs on one server. Small changes of a trace move a mean by a tenth, so each figure is over several
files: each leaves out another twentieth of the jobs, or shifts the submissions. G10 is about
streams of short jobs, from `small_servers`. GPULEASE_TRACES names the directory with the traces.
"""

import argparse
import csv
import gzip
import hashlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path

from benchmarks import small_servers
from gpulease.domain.queue_options import PolicyName, QueuePolicy
from gpulease.replay.engine import Contention, replay
from gpulease.replay.results import Figures, figures
from gpulease.replay.trace import Run, Server, TraceJob
from gpulease.units import GIB

HOUR, DAY = 3600.0, 86400.0
SERVER = Server(8, 24 * GIB)
WHOLE = 1000
"""The memory of one GPU, in the unit of openb."""
CLASSES = (HOUR, 4 * HOUR, DAY, 7 * DAY)
LIMITS = ("classes", "none", "30 %")
FAIR, EASY = QueuePolicy(), QueuePolicy(PolicyName.EASY)
BURST = 2000
"""Jobs of a mass submission."""
BURST_USER = "burst"
BURST_S = 10 * DAY
WATCHED_S = 4 * DAY
"""For how long after a mass submission the waits of others count."""
SHIFT_S = 600


def draw(text: str) -> int:
    """Return a number that a text decides: the same in every run, and on every machine."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a trace."""
    path = Path(os.environ["GPULEASE_TRACES"]) / name
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def month() -> tuple[TraceJob, ...]:
    """Return the month of Philly with the memory of openb."""
    pods = rows("openb_pod_list_default.csv.gz")
    sizes = [int(pod["gpu_milli"]) for pod in pods if pod["num_gpu"] == "1"]
    jobs = []
    for row in rows("philly_4vc_oct.csv.gz"):
        gpus = int(row["num_gpus"])
        size = WHOLE if gpus > 1 else sizes[draw(row["job"]) % len(sizes)]
        jobs.append(
            TraceJob(
                id=int(row["job"]),
                submit_s=float(row["submit_s"]),
                duration_s=float(row["duration_s"]),
                gpus=gpus,
                memory=SERVER.memory * size // WHOLE,
                user=row["vc"],
            )
        )
    return tuple(jobs)


@dataclass(frozen=True, slots=True)
class File:
    """One variant of the month."""

    number: int
    """Which twentieth of the jobs it leaves out."""
    part: int | None = None
    """Which part of the jobs it keeps, for one server; None: all, for six servers of 8 GPUs."""
    gpus: int = 8
    """Of that one server. It has so many of 48 parts of the jobs, without those on more GPUs."""
    shifted: bool = False
    """No job is left out, but each is submitted up to ten minutes later."""
    limits: str = "none"
    """Which jobs have time limits."""
    users: bool = False
    """Each tenant has ten users instead of one."""
    burst: bool = False
    """One user submits many jobs at once."""
    loads: bool = False
    """The utilization of each job is known: it depends on user, memory and GPUs."""

    @property
    def servers(self) -> list[Server]:
        return [SERVER] * 6 if self.part is None else [replace(SERVER, gpus=self.gpus)]

    def trace(self) -> list[TraceJob]:
        """Return the jobs, with ids in the order of submission."""
        kept = [self._job(job) for job in month() if self._keeps(job)]
        if self.burst:
            kept += _burst(BURST if self.part is None else BURST // 6)
        kept.sort(key=lambda job: job.submit_s)
        return [replace(job, id=number) for number, job in enumerate(kept, 1)]

    def _keeps(self, job: TraceJob) -> bool:
        if not self.shifted and draw(f"drop{self.number}-{job.id}") % 20 == 0:
            return False
        parts = 48 // self.gpus
        return self.part is None or (
            draw(f"s{job.id}") % parts == self.part and job.gpus <= self.gpus
        )

    def _job(self, job: TraceJob) -> TraceJob:
        limit = _limit(job) if self.limits != "none" else None
        if self.limits == "30 %" and not _gives_limit(job):
            limit = None
        user = f"{job.user}-{draw(f'{job.user}{job.id // 25}') % 10}" if self.users else job.user
        load = draw(f"u{user}-{job.memory}-{job.gpus}") % 101 / 100 if self.loads else None
        delay = draw(f"shift{self.number}-{job.id}") % SHIFT_S if self.shifted else 0
        at = job.submit_s + delay
        return replace(job, submit_s=at, time_limit_s=limit, user=user, utilization=load)


def _limit(job: TraceJob) -> float:
    """Return a limit of at least twice the run time; three of ten jobs ask for the longest."""
    if draw(f"l{job.id}") % 100 < 30:
        return CLASSES[-1]
    return next((each for each in CLASSES if each >= 2 * job.duration_s), CLASSES[-1])


def _gives_limit(job: TraceJob) -> bool:
    return draw(f"m{job.id}") % 100 < 30


def _burst(count: int) -> list[TraceJob]:
    one = TraceJob(0, BURST_S, HOUR, 1, SERVER.memory // 2, BURST_USER)
    return [replace(one, id=-number) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of a file."""

    file: File
    policy: QueuePolicy = FAIR
    whole_gpus: bool = False
    contention: Contention = Contention.NONE


@dataclass(frozen=True, slots=True)
class Result:
    """What a replay showed; spans in hours."""

    figures: Figures
    givers_h: float
    """The mean wait of jobs with a time limit."""
    others_h: float
    """The mean wait of jobs without one."""
    after_burst_h: float
    """The mean wait of jobs submitted in the days after the instant of a mass submission."""


def run(todo: Replay) -> Result:
    """Return what one replay shows."""
    runs = replay(
        todo.file.trace(),
        todo.file.servers,
        todo.policy,
        whole_gpus=todo.whole_gpus,
        contention=todo.contention,
    )
    end = BURST_S + WATCHED_S
    after = [each for each in runs if BURST_S <= each.job.submit_s < end]
    return Result(
        figures(runs, todo.file.servers),
        _mean_wait([each for each in runs if each.job.time_limit_s is not None]),
        _mean_wait([each for each in runs if each.job.time_limit_s is None]),
        _mean_wait([each for each in after if each.job.user != BURST_USER]),
    )


def _mean_wait(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.wait_s for run in runs) / HOUR if runs else 0.0


Results = dict[Replay, Result]
Pick = Callable[[Result], float]


def wait(result: Result) -> float:
    return result.figures.mean_wait_s / HOUR


def longest(result: Result) -> float:
    return result.figures.longest_wait_s / HOUR


def completion(result: Result) -> float:
    return result.figures.mean_completion_s / HOUR


def fairness(result: Result) -> float:
    return result.figures.jain_index


_OF_FILE = ("limits", "users", "burst", "loads", "shifted")


@dataclass(frozen=True, slots=True)
class Sample:
    """The files of one kind of server, in the order of their numbers."""

    name: str
    files: tuple[File, ...]

    def replays(self, **change: object) -> list[Replay]:
        """Return a replay of each file, with these changes of the file or of the replay."""
        of_file = {key: change.pop(key) for key in _OF_FILE if key in change}
        return [Replay(replace(file, **of_file), **change) for file in self.files]  # type: ignore[arg-type]


def samples(quick: bool) -> tuple[Sample, Sample]:
    """Return the month on six servers, and on one."""
    six = Sample("6x8", tuple(File(number) for number in range(2 if quick else 8)))
    numbers = range(1 if quick else 4)
    one = Sample("1x8", tuple(File(number, part) for number in numbers for part in range(6)))
    return six, one


@dataclass(frozen=True, slots=True)
class Line:
    """One goal."""

    goal: str
    what: str
    fair: float
    easy: float | None
    """The same figure under EASY backfill on whole GPUs."""
    measured: float
    bound: float
    at_most: bool = True
    unit: str = "h"

    def __str__(self) -> str:
        reached = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        beside = "" if self.easy is None else f"{self.easy:.2f}"
        sign = "<=" if self.at_most else ">="
        verdict = "reached" if reached else "MISSED"
        return (
            f"{self.goal:4}{self.what:38}{self.fair:7.2f} {self.unit:3}{beside:>7}"
            f"{self.measured:8.3f} {sign} {self.bound:5.2f}  {verdict}"
        )


def mean(results: Results, replays: Sequence[Replay], pick: Pick) -> float:
    return statistics.fmean(pick(results[each]) for each in replays)


def ratio(results: Results, some: Sequence[Replay], others: Sequence[Replay], pick: Pick) -> float:
    """Return the mean over files of the ratio of two replays."""
    pairs = zip(some, others, strict=True)
    return statistics.fmean(pick(results[one]) / pick(results[two]) for one, two in pairs)


def needed(six: Sample, one: Sample) -> Iterator[Replay]:
    """Yield all replays."""
    for sample in (six, one):
        for limits in LIMITS:
            yield from sample.replays(limits=limits)
            yield from sample.replays(limits=limits, policy=EASY, whole_gpus=True)
        for burst in (False, True):
            yield from sample.replays(users=True, burst=burst)
            yield from sample.replays(users=True, burst=burst, policy=EASY)
    for sample in shares(six, one):
        yield from itertools.chain(*sharing(sample).values())
    for limits in ("classes", "none"):
        yield from six.replays(limits=limits, shifted=True)
    yield from six.replays(whole_gpus=True)
    yield from six.replays(contention=Contention.PAIRS)
    yield from six.replays(contention=Contention.SLICES)


def shares(six: Sample, one: Sample) -> Iterator[Sample]:
    """Yield the servers for which it is shown what sharing busy GPUs is worth.

    Small ones have their part of the month, with ten users in each tenant.
    """
    yield replace(six, files=six.files[:4])
    yield replace(one, files=one.files[:6])
    for gpus in (2, 4, 8):
        parts = tuple(File(0, part, gpus, users=True) for part in range(48 // gpus))
        yield Sample(f"1x{gpus}, 40 users", parts)


def sharing(sample: Sample) -> dict[tuple[Contention, float], list[Replay]]:
    """Return the replays that show what the limit of utilization on a GPU is worth."""
    return {
        (slowdown, most): sample.replays(
            loads=True, contention=slowdown, policy=QueuePolicy(most_utilization=most)
        )
        for slowdown in (Contention.CURVE, Contention.PAIRS, Contention.SLICES)
        for most in (1.2, 2.0, 1000.0)
    }


def shared(results: Results, samples: Iterator[Sample]) -> Iterator[str]:
    """Yield a row for each kind of server: the mean hours from submission to end."""
    head = "  ".join(f"{kind:18}" for kind in ("curve", "pairs", "slices"))
    yield f"\ncompletion, most_utilization 1.2 / 2.0 / none\n{'':15}{head}"
    for sample in samples:
        means = [f"{mean(results, each, completion):.2f}" for each in sharing(sample).values()]
        cells = (" / ".join(means[at : at + 3]) for at in range(0, len(means), 3))
        yield f"{sample.name:15}" + "  ".join(f"{cell:18}" for cell in cells)


ABLATIONS: Mapping[str, QueuePolicy] = {
    "aging_jobs: all": QueuePolicy(aging_jobs=1_000_000),
    "run_time_samples: 1": QueuePolicy(run_time_samples=1),
    "reservation_slowdown: none": QueuePolicy(reservation_slowdown=1e9),
    "soft_reservation_after: none": QueuePolicy(soft_reservation_after=timedelta(days=999)),
    "no soft reservation": QueuePolicy(
        reservation_slowdown=1e9, soft_reservation_after=timedelta(hours=36)
    ),
    "backfill_factor: 1": QueuePolicy(backfill_factor=1.0),
    "hard_reservation_after: none": QueuePolicy(hard_reservation_after=timedelta(days=999)),
    "hard_reservation_waits: 0": QueuePolicy(hard_reservation_waits=0.0),
    "unlimited_run_time: 1 day": QueuePolicy(unlimited_run_time=timedelta(days=1)),
    "most_sharing: all": QueuePolicy(most_sharing=1_000_000),
}
"""The policy without each of its rules, or with another number.

Not here: `most_utilization`, which has a table of its own; `settling_time`, since a reading in a
replay is never late; and `preemption_grace`, since traces have no preemptible jobs.
"""


def ablation(six: Sample, one: Sample, policy: QueuePolicy) -> dict[str, tuple[list[Replay], Pick]]:
    """Return the replays for each figure of a policy, and how to get it."""
    overloaded = replace(one, files=one.files[:6])
    plain, small = six.replays(policy=policy), one.replays(policy=policy)
    return {
        "6x8 wait": (plain, wait),
        "classes": (six.replays(policy=policy, limits="classes"), wait),
        "1x8 wait": (small, wait),
        "classes ": (one.replays(policy=policy, limits="classes"), wait),
        "6x8 max": (plain, longest),
        "1x8 max": (small, longest),
        "Jain": (plain, fairness),
        "1/n": (six.replays(policy=policy, contention=Contention.SLICES), completion),
        "burst": (overloaded.replays(policy=policy, users=True, burst=True), _after_burst),
    }


def ablated(results: Results, six: Sample, one: Sample) -> Iterator[str]:
    """Yield a row for each ablation: the change of each figure in percent."""
    base = ablation(six, one, FAIR)
    yield f"{'change in %':32}" + "".join(f"{figure:>10}" for figure in base)
    for name, policy in ABLATIONS.items():
        row = f"{name:32}"
        for figure, (replays, pick) in ablation(six, one, policy).items():
            change = mean(results, replays, pick) / mean(results, base[figure][0], pick) - 1
            row += f"{100 * change:>+10.1f}"
        yield row


def lines(results: Results, six: Sample, one: Sample) -> Iterator[Line]:
    """Yield every goal with its figures."""
    yield from _waits(results, six, one)
    yield from _evenness(results, six, one)
    yield from _slowdown(results, six)
    for sample, bound in ((six, 2.0), (one, 1.5)):
        before, after = (sample.replays(users=True, burst=burst) for burst in (False, True))
        easy = [sample.replays(users=True, burst=burst, policy=EASY) for burst in (False, True)]
        waits = mean(results, after, _after_burst)
        grown = waits / mean(results, before, _after_burst)
        beside = mean(results, easy[1], _after_burst) / mean(results, easy[0], _after_burst)
        what = f"{sample.name} others after 2000 jobs (EASY x {beside:.1f})"
        yield Line("G9", what, waits, None, grown, bound)


def _after_burst(result: Result) -> float:
    return result.after_burst_h


def _waits(results: Results, six: Sample, one: Sample) -> Iterator[Line]:
    goals = {
        ("6x8", "classes"): ("G3", 0.40),
        ("6x8", "none"): ("G4", 0.45),
        ("6x8", "30 %"): ("G4b", 0.45),
        ("1x8", "classes"): ("G5", 0.70),
        ("1x8", "none"): ("G5", 0.60),
        ("1x8", "30 %"): ("G5", 0.65),
    }
    for sample in (six, one):
        for limits in LIMITS:
            goal, bound = goals[sample.name, limits]
            fair = sample.replays(limits=limits)
            easy = sample.replays(limits=limits, policy=EASY, whole_gpus=True)
            what = f"{sample.name} mean wait, limits: {limits}"
            ours, theirs = mean(results, fair, wait), mean(results, easy, wait)
            yield Line(goal, what, ours, theirs, ratio(results, fair, easy, wait), bound)
    without = six.replays()
    known = six.replays(limits="classes", policy=EASY, whole_gpus=True)
    ours, theirs = mean(results, without, wait), mean(results, known, wait)
    what = "6x8 without limits, EASY with classes"
    yield Line("G4", what, ours, theirs, ratio(results, without, known, wait), 1.0)
    some = [results[each] for each in six.replays(limits="30 %")]
    givers = statistics.fmean(each.givers_h for each in some)
    others = statistics.fmean(each.others_h for each in some)
    yield Line("G4b", "6x8 who gives a limit, to the others", givers, None, givers / others, 0.8)


def _evenness(results: Results, six: Sample, one: Sample) -> Iterator[Line]:
    bounds = [(six, "classes", 1.0), (six, "none", 1.15), *((one, each, 1.05) for each in LIMITS)]
    for sample, limits, bound in bounds:
        ours = mean(results, sample.replays(limits=limits), longest)
        easy = sample.replays(limits=limits, policy=EASY, whole_gpus=True)
        theirs = mean(results, easy, longest)
        what = f"{sample.name} longest wait, limits: {limits}"
        yield Line("G6", what, ours, theirs, ours / theirs, bound)
    for limits in ("classes", "none"):
        ours = mean(results, six.replays(limits=limits, shifted=True), fairness)
        what = f"6x8 Jain over tenants, limits: {limits}"
        yield Line("G7", what, ours, None, ours, 0.91, at_most=False, unit="")


def _slowdown(results: Results, six: Sample) -> Iterator[Line]:
    whole = mean(results, six.replays(whole_gpus=True), completion)
    easy = mean(results, six.replays(policy=EASY, whole_gpus=True), completion)
    slices = mean(results, six.replays(contention=Contention.SLICES), completion)
    pairs = mean(results, six.replays(contention=Contention.PAIRS), completion)
    yield Line("G8", "6x8 completion under 1/n, to whole GPUs", slices, easy, slices / whole, 1.05)
    yield Line("G8", "the same, to EASY on whole GPUs", slices, easy, slices / easy, 0.75)
    yield Line("G8", "6x8 completion under .929, to whole", pairs, easy, pairs / whole, 0.90)


def waits_of_wide_jobs(
    streams: Sequence[small_servers.Stream], worst: Sequence[float]
) -> Iterator[Line]:
    for stream, wait_s in zip(streams, worst, strict=True):
        what = f"1x{stream.gpus} all GPUs, in jobs of {stream.length_s:g} s"
        bound = stream.bound_s(FAIR)
        yield Line("G10", what, wait_s, None, wait_s / bound, 1.0, unit="s")


def main(arguments: Sequence[str]) -> int:
    """Print each goal, and return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the files")
    parser.add_argument("--ablate", action="store_true", help="each number of the policy, changed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    if "GPULEASE_TRACES" not in os.environ:
        sys.exit("GPULEASE_TRACES names no directory with the traces")
    six, one = samples(options.quick)
    if options.ablate:
        policies = (FAIR, *ABLATIONS.values())
        rows_of = (ablation(six, one, policy).values() for policy in policies)
        todo = [each for row in rows_of for replays, _ in row for each in replays]
    else:
        todo = list(needed(six, one))
    todo = list(dict.fromkeys(todo))
    with ProcessPoolExecutor(options.processes) as executor:
        results = dict(zip(todo, executor.map(run, todo, chunksize=2), strict=True))
        if options.ablate:
            print("\n".join(ablated(results, six, one)))
            return 0
        streams = [*small_servers.streams()]
        worst = [*executor.map(small_servers.worst_wait_s, streams)]
    print(f"{'':42}{'fair':>7}    {'EASY':>7}{'ratio':>8}    goal")
    every = (*lines(results, six, one), *waits_of_wide_jobs(streams, worst))
    shown = [str(line) for line in every]
    print("\n".join([*shown, *shared(results, shares(six, one))]))
    return int(any("MISSED" in line for line in shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
