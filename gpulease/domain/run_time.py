"""Predicts run times and utilizations from the last runs of similar jobs.

A prediction comes from the most specific series with enough runs: the user's same command, a
similar command, the same size and class of time limit, then coarser ones. Runs of other users count
only where nothing is known about the user.
"""

import math
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

from gpulease.domain.job import CommandFingerprint
from gpulease.domain.lease import Claim

Keys = tuple[str, ...]
"""The names of the series of a job, the most specific first."""
ALL_JOBS = ""
"""The series of all jobs."""

_CLASSES = tuple(timedelta(hours=hours) for hours in (1, 4, 24, 7 * 24))
_QUARTERS = 4
_ENOUGH = 2
"""Runs in a series before it is used. One run says little: many first runs fail at once."""


def limit_class(limit: timedelta | None) -> int:
    """Return the class of a time limit: up to 1 h, 4 h, 24 h, 7 days, or longer and none.

    Users who give limits give longer ones to longer jobs. A lab where everybody asks for 7 days
    has one class and loses nothing.
    """
    if limit is None:
        return len(_CLASSES)
    return sum(limit > bound for bound in _CLASSES)


def keys_of(user: str, claim: Claim, share: float, fingerprint: CommandFingerprint | None) -> Keys:
    """Return the series that a job belongs to.

    Args:
        user: its owner.
        claim: what it asks for.
        share: the claimed part of a GPU's memory, 0 to 1.
        fingerprint: identifies its command, if known.
    """
    limit = limit_class(claim.time_limit)
    quarters = math.ceil(share * _QUARTERS)
    commands = () if fingerprint is None else (fingerprint.exact_key, fingerprint.similar_key)
    # Names of users contain no slash.
    return (
        *(f"{user}/command {key}" for key in commands),
        f"{user}/{limit}/{claim.gpus}/{quarters}",
        f"{user}/{limit}/{claim.gpus}",
        f"{user}/{limit}",
        f"/{limit}",
        ALL_JOBS,
    )


@dataclass(slots=True)
class _Series:
    seconds: deque[float]
    utilizations: deque[float]


class RunTimes:
    """The last runs of each series of similar jobs."""

    def __init__(self, samples: int = 10) -> None:
        self._samples = samples
        self._series: dict[str, _Series] = {}
        self._seconds: dict[str, float] = {}
        """The mean run time of each series with enough runs."""
        self._utilization: dict[str, float] = {}
        self.version = 0
        """Changes whenever a prediction may."""

    def record(self, keys: Keys, seconds: float, utilization: float | None = None) -> None:
        """Add a run that has ended; `utilization` is the mean of its GPUs, 0 to 1, if known."""
        self.version += 1
        for key in keys:
            series = self._series.get(key)
            if series is None:
                new = _Series(deque(maxlen=self._samples), deque(maxlen=self._samples))
                series = self._series[key] = new
            series.seconds.append(seconds)
            if len(series.seconds) >= _ENOUGH or key == ALL_JOBS:
                self._seconds[key] = sum(series.seconds) / len(series.seconds)
            if utilization is not None:
                series.utilizations.append(utilization)
                mean = sum(series.utilizations) / len(series.utilizations)
                self._utilization[key] = mean

    def seconds(self, keys: Keys) -> float | None:
        """Return the predicted run time; None if no run is known at all."""
        means = self._seconds
        for key in keys:
            mean = means.get(key)
            if mean is not None:
                return mean
        return None

    def utilization(self, keys: Keys) -> float | None:
        """Return the usual utilization of each GPU, 0 to 1; None if it is unknown."""
        if not self._utilization:
            return None
        return next((self._utilization[key] for key in keys if key in self._utilization), None)
