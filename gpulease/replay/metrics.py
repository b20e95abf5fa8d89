"""The figures of a replay: how long jobs waited, how full the GPUs were, how even it was for users.

docs/admin/replay.md defines each figure.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpulease.replay.trace import Run, Server


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
    return Figures(
        jobs=len(runs),
        mean_wait_s=_mean(waits),
        median_wait_s=percentile(waits, 50),
        p95_wait_s=percentile(waits, 95),
        p99_wait_s=percentile(waits, 99),
        longest_wait_s=waits[-1],
        mean_completion_s=_mean([run.completion_s for run in runs]),
        memory_utilization=_ratio(held, capacity * makespan),
        fragmentation=_fragmentation(runs, capacity),
        jain_index=jain([user.speed for user in by_user(runs)]),
        makespan_s=makespan,
    )


def by_user(runs: Iterable[Run]) -> list[UserFigures]:
    """Return how each user fared, by name."""
    of_user: dict[str, list[Run]] = {}
    for run in runs:
        of_user.setdefault(run.job.user, []).append(run)
    return [_user_figures(user, of_user[user]) for user in sorted(of_user)]


def _user_figures(user: str, runs: Sequence[Run]) -> UserFigures:
    waits = [run.wait_s for run in runs]
    ran_s = math.fsum(run.end_s - run.start_s for run in runs)
    completion_s = math.fsum(run.completion_s for run in runs)
    # A user whose jobs took no time at all did not wait either.
    speed = ran_s / completion_s if completion_s else 1.0
    return UserFigures(user, len(runs), _mean(waits), max(waits), speed)


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


def _fragmentation(runs: Sequence[Run], capacity: int) -> float:
    free = waited_s = 0.0
    for span_s, waiting, memory in _spans(runs):
        if waiting:
            free += span_s * (capacity - memory)
            waited_s += span_s
    return _ratio(free, capacity * waited_s)


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
