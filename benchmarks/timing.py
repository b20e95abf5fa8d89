"""Timing: medians of interleaved repetitions, so that drift of the machine affects all alike."""

import statistics
import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def paired(
    one: Callable[[], object], other: Callable[[], object], times: int
) -> tuple[float, float]:
    """Return the median seconds of each call; the calls alternate."""
    both = [(seconds(one), seconds(other)) for _ in range(times)]
    return statistics.median(a for a, _ in both), statistics.median(b for _, b in both)
