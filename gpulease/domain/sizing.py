"""How much memory a job should ask for, by what its likes used before. Pure, in bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gpulease.units import GIB, MIB

MARGIN = Fraction(115, 100)
"""What is asked for beyond the highest use seen: data differs, and a look a second misses peaks."""
MOST_RUNS = 10
"""The latest runs of a script that count."""
ENOUGH_RUNS = 3
"""Of fewer, the one with the largest need decides: nobody can tell which one is odd."""
_ROUND_TO = 256 * MIB
_ENOUGH_MORE = Fraction(125, 100)
"""Of a lease that did not do, where the job does not say how much it lacked."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one ended job asked for and used, on the GPU where it used most."""

    leased: int
    used: int
    out_of_memory: bool = False
    over_lease: bool = False
    """It was stopped for holding more than its lease."""

    @property
    def fell_short(self) -> bool:
        """Whether its lease was not enough for it.

        A run may also have been stopped for its use of a GPU that it did not lease.
        """
        return self.out_of_memory or (self.over_lease and self.used > self.leased)


def size_for(runs: Sequence[Run]) -> int | None:
    """Return what the next job like `runs`, latest first, should ask for; None without any.

    It is what the deciding run needed: its use with a margin, but never more than a lease that was
    enough for it, or else a framework that takes all it may from its start would grow from run to
    run. After a run that ran out of memory or was stopped over its lease it is no less than the
    smallest lease that was enough for another run, or else more than that one had, and no less than
    its owner was told to ask for.
    """
    found = deciding(runs)
    return None if found is None else rounded(_need(found, runs[:MOST_RUNS]))


def deciding(runs: Sequence[Run]) -> Run | None:
    """Return the one of `runs`, latest first, by which the next job is sized; None without any.

    Of three runs or more it is the one with the second largest need: one odd run decides nothing,
    and a need that really grew is followed when two runs have shown it. The latest run decides at
    once where its lease was not enough for it.
    """
    latest = runs[:MOST_RUNS]
    if not latest:
        return None
    by_need = sorted(latest, key=lambda run: _need(run, latest), reverse=True)
    found = by_need[1 if len(latest) >= ENOUGH_RUNS else 0]
    is_short = latest[0].fell_short and _need(latest[0], latest) > _need(found, latest)
    return latest[0] if is_short else found


def _need(run: Run, runs: Sequence[Run]) -> int:
    """Return the lease that would have been enough for `run`, as far as `runs` show it."""
    if not run.fell_short:
        return _size_after(run)
    enough = [each.leased for each in runs if not each.fell_short and each.leased > run.leased]
    need = min(enough, default=int(run.leased * _ENOUGH_MORE))
    return need if run.out_of_memory else max(need, _size_after(run))


def _size_after(run: Run) -> int:
    wanted = int(run.used * MARGIN)
    if run.fell_short:
        return max(wanted, enough_for(run.used))
    return min(wanted, run.leased) if run.used <= run.leased else wanted


def rounded(size: int) -> int:
    """Return `size` rounded up as a person would: to 128M below 1G, 512M below 16G, else 1G."""
    step = 128 * MIB if size < GIB else 512 * MIB if size < 16 * GIB else GIB
    return -(-size // step) * step


def enough_for(held: int) -> int:
    """Return the size of a lease that would have held so much, with a little to spare."""
    needed = held + held // 20
    return -(-needed // _ROUND_TO) * _ROUND_TO


def more_by(leased: int, factor: Fraction) -> int:
    """Return the lease of a new try with `factor` times as much, in whole MiB; always more."""
    return max(math.ceil(leased * factor / MIB), leased // MIB + 1) * MIB


def next_size(leased: int, lacking: int | None) -> int:
    """Return what a job should ask for that ran out of memory in a lease of `leased`.

    `lacking` is what it could not get in one piece, if it said; it will want more after that.
    """
    enough = int(leased * _ENOUGH_MORE)
    if lacking is not None:
        enough = max(enough, leased + int(lacking * MARGIN))
    return rounded(enough)
