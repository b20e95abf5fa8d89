"""Estimates the memory of a job from past runs of its command, and the overhead of frameworks.

Pure functions; sizes in bytes.

Runs are compared by a fingerprint of the command (gpulease/fingerprint.py).

The overhead of a framework is the memory of a process beside its pool. It is observed as the
driver's figure for the process less the hook's figure for the pool, and the hook runs as the user.
So the reports of one user count for that user alone. For other users, the median of at least three
users' figures counts, which no single user can move beyond the others'. Any figure stays within
bounds around the default.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from statistics import median_high

from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.overuse import MOST_EXCESS_OVERHEAD
from gpulease.units import MIB, round_up_size

MARGIN = Fraction(115, 100)
"""The factor over the highest observed use: data differs, and one sample a second misses peaks."""
MOST_RUNS = 10
"""The number of latest runs that count."""
LONG_ENOUGH = timedelta(seconds=30)
"""Of a shorter run, peaks may have been missed."""
_SHOWS_USE = frozenset({Outcome.CANCELLED, Outcome.TIME_LIMIT, Outcome.RELEASED})
"""Ends after which the use counts, besides success."""
ENOUGH_RUNS = 3
"""With fewer runs an outlier cannot be recognised."""
_ENOUGH_MORE = Fraction(125, 100)
"""The factor for a lease that was too small, if the missing size is unknown."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """Lease and use of one ended job, in bytes, on the GPU where it used most."""

    leased: int
    used: int
    out_of_memory: bool = False
    over_lease: bool = False
    """It was stopped for using more than its lease."""

    @property
    def fell_short(self) -> bool:
        """Whether its lease was too small.

        A run that was stopped over its lease may have been over on a GPU that it did not lease.
        """
        return self.out_of_memory or (self.over_lease and self.used > self.leased)


def size_for(runs: Sequence[PastRun]) -> int | None:
    """Return the memory for the next job like `runs`, latest first; None without runs.

    It is what the deciding run needed: its use with a margin, but not more than a lease that was
    sufficient. Otherwise a framework that allocates all its memory at start would grow from run to
    run. If the deciding run fell short, it is the smallest larger lease that was sufficient for
    another run, or else a larger one than that run had, and never less than the size advised to its
    owner.
    """
    found = deciding_run(runs)
    return None if found is None else round_up_size(_need(found, runs[:MOST_RUNS]))


def deciding_run(runs: Sequence[PastRun]) -> PastRun | None:
    """Return the one of `runs`, latest first, that decides the next size; None without runs.

    It is the one with the largest need, since a smaller lease would end a job like it. Of three
    runs or more, one that fell short counts only if it is the latest, or if another run needed as
    much: its need is a guess, and its options may have been wrong.
    """
    latest = runs[:MOST_RUNS]
    if not latest:
        return None
    by_need = sorted(latest, key=lambda run: _need(run, latest), reverse=True)
    is_outlier = by_need[0].fell_short and by_need[0] is not latest[0]
    return by_need[1 if is_outlier and len(latest) >= ENOUGH_RUNS else 0]


def _need(run: PastRun, runs: Sequence[PastRun]) -> int:
    """Return the lease that would have been sufficient for `run`, judging by `runs`."""
    if not run.fell_short:
        return _size_after(run)
    sufficient = [each.leased for each in runs if not each.fell_short and each.leased > run.leased]
    need = min(sufficient, default=int(run.leased * _ENOUGH_MORE))
    return need if run.used <= run.leased else max(need, _size_after(run))


def _size_after(run: PastRun) -> int:
    wanted = int(run.used * MARGIN)
    return min(wanted, run.leased) if run.used <= run.leased else wanted


def size_next_time(job: Job, smallest: int = 0) -> int | None:
    """Return the size to ask for next time, for a job that had more than it needed.

    It is at least the `smallest` lease.
    None: its size was enough or came from past runs, or too little is known. A job that failed may
    have failed at its first line. One that ran out of memory, or used more than its lease, is
    advised otherwise.
    """
    used = [(lease.used, lease.memory) for lease in job.leases if lease.used]
    if not used or not _shows_its_use(job) or job.usage.size_reason is not None:
        return None
    most, leased = max(used)
    size = max(advised_size(most), smallest)
    return size if size < leased else None


def _shows_its_use(job: Job) -> bool:
    if job.started_at is None or job.ended_at is None or job.usage.out_of_memory:
        return False
    has_succeeded = job.outcome is Outcome.EXITED and job.exit == Exit(0)
    is_shown = has_succeeded or job.outcome in _SHOWS_USE
    return is_shown and job.ended_at - job.started_at >= LONG_ENOUGH


def retry_size(leased: int, factor: Fraction) -> int:
    """Return the lease of a retry with `factor` times the memory, in whole MiB; always larger."""
    return max(math.ceil(leased * factor / MIB), leased // MIB + 1) * MIB


def advised_size(peak: int) -> int:
    """Return the size to ask for next time, for a job that held `peak` bytes beyond its lease."""
    return round_up_size(int(peak * MARGIN))


def advised_size_after_oom(leased: int, peak: int | None, lacking: int | None) -> int:
    """Return the size to ask for next time, for a job that ran out of memory.

    Args:
        leased: the size of its lease.
        peak: the most that it held, where known. A job over its lease was advised by this before.
        lacking: what it could not allocate in one piece, where known; it needs more after that.
    """
    enough = max(int(leased * _ENOUGH_MORE), leased + int((lacking or 0) * MARGIN))
    return max(round_up_size(enough), advised_size(peak or 0))


@dataclass(frozen=True, slots=True)
class OverheadKey:
    """Where an overhead applies: framework, GPU model, driver version, number of GPUs."""

    framework: str
    model: str
    driver: str
    """Its version; "" if unknown."""
    gpus: int


LATEST = 20
"""The number of latest jobs of one user that count."""
ENOUGH_JOBS = 3
"""Fewer observations do not count."""
ENOUGH_USERS = 3
SPARE = 48 * MIB
"""Added to the observed figure: the next job may load another kernel."""
STEP = 16 * MIB
LEAST, MOST = (1, 3), (3, 1)
"""Bounds as fractions of the default: less would count the context as pool, more would make leases
useless. The upper one also covers what a job may hold without being stopped."""


def learned_overhead(default: int, uid: int, seen: Mapping[int, Sequence[int]]) -> int:
    """Return the overhead of a framework for jobs of `uid`, in bytes.

    Args:
        default: the overhead without observations.
        uid: the owner of the job.
        seen: the observed overheads of jobs in bytes, by uid, latest first.
    """
    own = _figure(seen.get(uid, ()))
    found = own if own is not None else _common(seen)
    if found is None:
        # A single job shows that the default is too low, but not that it is too high.
        found = max(seen.get(uid, ()), default=0)
        if found <= default:
            return default
    most = max(default * MOST[0] // MOST[1], default + MOST_EXCESS_OVERHEAD)
    bounded = min(max(found + SPARE, default * LEAST[0] // LEAST[1]), most)
    return -(-bounded // STEP) * STEP


def _figure(observed: Sequence[int]) -> int | None:
    """Return the 90th percentile of a user's latest jobs, if there are enough."""
    latest = sorted(observed[:LATEST])
    if len(latest) < ENOUGH_JOBS:
        return None
    return latest[-1 - len(latest) // 10]


def _common(seen: Mapping[int, Sequence[int]]) -> int | None:
    figures = [figure for each in seen.values() if (figure := _figure(each)) is not None]
    return median_high(figures) if len(figures) >= ENOUGH_USERS else None
