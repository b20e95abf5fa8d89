"""Divide the limit of a GPU among the logical GPUs on it. Pure arithmetic, in MiB."""

from __future__ import annotations

import math

from .lease import LeaseTooSmall


def partition(wishes: list[float], limit: int, split: int) -> list[int | float]:
    """Return the sizes of a GPU's logical GPUs, which add up to at most `limit`.

    `wishes` are the sizes that the script asked for: kept if they fit together, else scaled down
    alike. A script that asked for none gets `split` equal ones. A wish that is no positive number
    means all there is.

    Raises:
        LeaseTooSmall: if there are more logical GPUs than MiB.
    """
    count = len(wishes) or split
    if count > limit:
        raise LeaseTooSmall(
            "cannot make %d logical GPUs of %dM: each needs at least 1M\n\n"
            "hint: ask for fewer, or for more memory with --mem" % (count, limit)
        )
    if not wishes:
        return [limit // split] * split
    asked = [wish if math.isfinite(wish) and wish > 0 else float(limit) for wish in wishes]
    return list(asked) if sum(asked) <= limit else list(_scaled(asked, limit))


def _scaled(wishes: list[float], limit: int) -> list[int]:
    largest = max(wishes)  # divided out first: the sum of huge wishes would be infinite
    whole = sum(wish / largest for wish in wishes)
    sizes = [max(1, int(wish / largest * limit / whole)) for wish in wishes]
    while sum(sizes) > limit:  # where the smallest were rounded up to 1
        sizes[sizes.index(max(sizes))] -= 1
    return sizes
