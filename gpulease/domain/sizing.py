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
        """Whether its lease was not enough for it."""
        return self.out_of_memory or self.over_lease


def size_for(runs: Sequence[Run]) -> int | None:
    """Return what the next job like `runs` should ask for on each GPU; None without any.

    Their highest use with a margin, but never more than a lease that did for the run that used
    most: a framework that takes all it may from its start would otherwise grow from run to run.
    Where one ran out of memory or was stopped over its lease, no less than the smallest lease that
    did, or else more than it had, and no less than its owner was told to ask for.
    """
    if not runs:
        return None
    latest = runs[:MOST_RUNS]
    sizes = [_size_after(run) for run in latest if not run.out_of_memory]
    too_small = max((run.leased for run in latest if run.fell_short), default=None)
    if too_small is not None:
        enough = [run.leased for run in latest if not run.fell_short and run.leased > too_small]
        sizes.append(min(enough, default=int(too_small * _ENOUGH_MORE)))
    return rounded(max(sizes))


def _size_after(run: Run) -> int:
    wanted = int(run.used * MARGIN)
    if run.over_lease:
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
