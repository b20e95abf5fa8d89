"""What a framework takes beside its pool, learnt from what jobs showed. Pure, in bytes.

What was observed is half the user's word: the driver says what a process holds, and the hook in it
what its pool holds. So one user's reports decide for that user alone. For others a figure counts
when three users have shown one, and it is the middle one of theirs, which no single user can carry
beyond what the others showed. And whatever was reported, the figure stays within a factor of what
gpulease would start from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from gpulease.units import MIB


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a figure holds: for a framework, on GPUs of a model, under a driver, on so many."""

    framework: str
    model: str
    driver: str
    """Its version; "" where it is unknown."""
    gpus: int


LATEST = 20
"""The latest jobs of one user that count."""
ENOUGH_JOBS = 3
"""Fewer observations than this are chance."""
ENOUGH_USERS = 3
SPARE = 48 * MIB
"""Added to what was seen: the next job may load a kernel more."""
STEP = 16 * MIB
LEAST, MOST = (1, 3), (3, 1)
"""Of the start, as fractions: less would take the context for pool, more would make leases
useless."""


def learned(start: int, uid: int, seen: Mapping[int, Sequence[int]]) -> int:
    """Return how many bytes to keep free beside the pool of a framework, for jobs of `uid`.

    Args:
        start: what the table says where nothing was observed.
        uid: whose job it is.
        seen: what jobs were observed to hold beside their pools, by user, latest first.
    """
    own = _figure(seen.get(uid, ()))
    found = own if own is not None else _common(seen)
    if found is None:
        return start
    bounded = min(max(found + SPARE, start * LEAST[0] // LEAST[1]), start * MOST[0] // MOST[1])
    return -(-bounded // STEP) * STEP


def _figure(observed: Sequence[int]) -> int | None:
    """Return the highest of a user's latest jobs but one in ten, if there are enough."""
    latest = sorted(observed[:LATEST])
    if len(latest) < ENOUGH_JOBS:
        return None
    return latest[-1 - len(latest) // 10]


def _common(seen: Mapping[int, Sequence[int]]) -> int | None:
    figures = [figure for each in seen.values() if (figure := _figure(each)) is not None]
    return median_high(figures) if len(figures) >= ENOUGH_USERS else None
