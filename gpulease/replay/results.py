"""Replays one trace under several settings, and computes the figures of each.

How long jobs waited, how full the GPUs were, how even it was for users, and how good the expected
starts of waiting jobs are. docs/admin/replay.md defines each figure.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from signal import SIG_DFL, SIGINT, signal
from statistics import median

from gpulease.domain.explain import Explanations
from gpulease.domain.forecast import Start
from gpulease.domain.gpu import JobId
from gpulease.domain.queue_options import PolicyName, QueuePolicy
from gpulease.replay.engine import PLACEMENTS, Contention, Moment, replay
from gpulease.replay.trace import Run, Server, TraceJob


@dataclass(frozen=True, slots=True)
class Figures:
    """What a replay is judged by. Spans are in seconds."""

    jobs: int
    mean_wait_s: float
    median_wait_s: float
    p95_wait_s: float
    p99_wait_s: float
    longest_wait_s: float
    mean_completion_s: float
    """From submission to end."""
    memory_utilization: float
    """The part of all memory, from the first submission to the last end, that jobs asked for and
    held."""
    fragmentation: float
    """The same for memory that no job held while others waited."""
    jain_index: float
    """Jain's index over users of run time / (wait + run time); 1 is even."""
    makespan_s: float
    """From the first submission to the last end."""


@dataclass(frozen=True, slots=True)
class UserFigures:
    """How one user fared."""

    user: str
    jobs: int
    mean_wait_s: float
    longest_wait_s: float
    speed: float
    """Run time / (wait + run time), summed over the jobs; 1 is without any wait."""


def figures(runs: Sequence[Run], servers: Sequence[Server]) -> Figures:
    """Return the figures of a replay of at least one job."""
    waits = sorted(run.wait_s for run in runs)
    makespan = max(run.end_s for run in runs) - min(run.job.submit_s for run in runs)
    capacity = sum(server.gpus * server.memory for server in servers)
    held = math.fsum((run.end_s - run.start_s) * _memory(run) for run in runs)
    free = waited_s = 0.0
    for span_s, waiting, memory in _spans(runs):
        if waiting:
            free += span_s * (capacity - memory)
            waited_s += span_s
    return Figures(
        jobs=len(runs),
        mean_wait_s=_mean(waits),
        median_wait_s=percentile(waits, 50),
        p95_wait_s=percentile(waits, 95),
        p99_wait_s=percentile(waits, 99),
        longest_wait_s=waits[-1],
        mean_completion_s=_mean([run.completion_s for run in runs]),
        memory_utilization=_ratio(held, capacity * makespan),
        fragmentation=_ratio(free, capacity * waited_s),
        jain_index=jain([user.speed for user in by_user(runs)]),
        makespan_s=makespan,
    )


def by_user(runs: Iterable[Run]) -> list[UserFigures]:
    """Return how each user fared, by name."""
    of_user: dict[str, list[Run]] = {}
    for run in runs:
        of_user.setdefault(run.job.user, []).append(run)
    found = []
    for user, own in sorted(of_user.items()):
        waits = [run.wait_s for run in own]
        ran_s = math.fsum(run.end_s - run.start_s for run in own)
        completion_s = math.fsum(run.completion_s for run in own)
        # A user whose jobs took no time at all did not wait either.
        speed = ran_s / completion_s if completion_s else 1.0
        found.append(UserFigures(user, len(own), _mean(waits), max(waits), speed))
    return found


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one of n has everything.

    R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness and Discrimination for Resource
    Allocation in Shared Computer Systems", DEC-TR-301, 1984.
    """
    squares = math.fsum(value * value for value in values)
    return _ratio(math.fsum(values) ** 2, len(values) * squares) if squares else 1.0


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that `percent` of them do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _spans(runs: Sequence[Run]) -> Iterator[tuple[float, int, int]]:
    """Yield how long, how many jobs waited, and how much memory was held meanwhile."""
    events = sorted(
        event
        for run in runs
        for event in (
            (run.job.submit_s, 1, 0),
            (run.start_s, -1, _memory(run)),
            (run.end_s, 0, -_memory(run)),
        )
    )
    waiting = memory = 0
    for (at, waits, held), (next_at, _, _) in pairwise(events):
        waiting, memory = waiting + waits, memory + held
        if next_at > at:
            yield next_at - at, waiting, memory


def _memory(run: Run) -> int:
    """Return the bytes that a job asked for, also where it holds whole GPUs."""
    return run.job.memory * run.job.gpus


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


EVERY = 200
"""Decisions from one prediction to the next: a forward run costs as much as many decisions."""


@dataclass(frozen=True, slots=True)
class StartErrors:
    """The errors of the first predictions for jobs."""

    jobs: int
    median_error_s: float
    """Of the absolute differences between predicted and actual start."""
    median_wait_s: float
    """Of what they still waited when the prediction was made, to compare with."""
    in_range: int
    """The jobs that started in the range of their prediction."""


class StartPredictions:
    """Observes a replay, and predicts the starts of the jobs that wait now and then."""

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._seen = 0
        self._first: dict[JobId, tuple[float, datetime, Start]] = {}
        """When each job was predicted first, on the clock of the trace and as an instant, and the
        start."""

    def __call__(self, moment: Moment) -> None:
        """Predict starts, if it is time for that."""
        self._seen += 1
        if self._seen % self._every:
            return
        snapshot = moment.snapshot
        decided = replace(moment.plan, snapshot=replace(snapshot, queue=None))
        for job, start in Explanations(decided).starts.items():
            self._first.setdefault(job, (moment.at_s, snapshot.at, start))

    def errors(self, runs: Sequence[Run]) -> StartErrors | None:
        """Compare the predictions with what happened; None if no job waited."""
        found = []
        for run in runs:
            if run.job.id in self._first:
                at_s, at, start = self._first[JobId(run.job.id)]
                left = timedelta(seconds=run.start_s - at_s)
                found.append((left, at + left, start))
        if not found:
            return None
        return StartErrors(
            len(found),
            median(abs(actual - start.at).total_seconds() for _, actual, start in found),
            median(left.total_seconds() for left, _, _ in found),
            sum(start.earliest <= actual <= start.latest for _, actual, start in found),
        )


_FEW_JOBS = 200
"""So many take less time than starting processes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to replay a trace. The values are those of the command line."""

    policy: str = "fair"
    whole_gpus: bool = False
    contention: str = "none"
    placement: str = "best"

    @property
    def name(self) -> str:
        """The settings in two words: the policy, and what a job gets."""
        return f"{self.policy}, {'whole GPUs' if self.whole_gpus else 'leases'}"


@dataclass(frozen=True, slots=True)
class Result:
    """A replay under some settings."""

    settings: Settings
    runs: list[Run]
    figures: Figures
    users: list[UserFigures]
    starts: StartErrors | None = None
    """How good predictions of starts were; None for what is compared with, or if no job waited."""


def baselines(asked: Settings) -> list[Settings]:
    """Return what to compare with: whole GPUs, under EASY (as Slurm does) and under FIFO."""
    whole = replace(asked, whole_gpus=True, placement="best")
    return [each for policy in ("easy", "fifo") if (each := replace(whole, policy=policy)) != asked]


def compare(
    jobs: Sequence[TraceJob], servers: Sequence[Server], all_settings: Sequence[Settings]
) -> list[Result]:
    """Return the replays of `jobs` under each of the settings, in that order.

    For the first of them, starts are predicted.
    """
    one = partial(_result, jobs, servers)
    predicts = [True, *(False for _ in all_settings[1:])]
    if len(jobs) <= _FEW_JOBS:
        return list(map(one, all_settings, predicts))
    workers = min(len(all_settings), len(os.sched_getaffinity(0)))
    # At Ctrl-C, which the processes get too, they end without a traceback.
    quiet = partial(signal, SIGINT, SIG_DFL)
    with ProcessPoolExecutor(workers, get_context("spawn"), quiet) as pool:
        return list(pool.map(one, all_settings, predicts))


def _result(
    jobs: Sequence[TraceJob], servers: Sequence[Server], settings: Settings, predicts: bool
) -> Result:
    every = EVERY if len(jobs) > _FEW_JOBS else 1
    predictions = StartPredictions(every) if predicts else None
    runs = replay(
        jobs,
        servers,
        QueuePolicy(PolicyName(settings.policy)),
        whole_gpus=settings.whole_gpus,
        contention=Contention(settings.contention),
        placement=PLACEMENTS[settings.placement],
        observe=predictions,
    )
    starts = predictions.errors(runs) if predictions else None
    return Result(settings, runs, figures(runs, servers), by_user(runs), starts)
