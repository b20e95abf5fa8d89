"""What the queue learns from past jobs: run times, utilizations, and the use of each user.

A prediction comes from the most specific series with enough runs: the user's same command, a
similar command, the same size and class of time limit, then coarser ones. Runs of other users count
only where nothing is known about the user.

Use is memory on all GPUs times time, in byte-seconds. It decays with a half-life, so that old use
is forgotten.
"""

import math
from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

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
    # Names of users contain no slash.
    return (
        *command_keys(user, fingerprint),
        f"{user}/{limit}/{claim.gpus}/{quarters}",
        f"{user}/{limit}/{claim.gpus}",
        f"{user}/{limit}",
        f"/{limit}",
        ALL_JOBS,
    )


def command_keys(user: str, fingerprint: CommandFingerprint | None) -> Keys:
    """Return the series of a user's same command, and of similar ones; none if it is unknown."""
    if fingerprint is None:
        return ()
    return f"{user}/command {fingerprint.exact_key}", f"{user}/command {fingerprint.similar_key}"


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
        self._medians: dict[str, float] = {}
        """The same by the median."""
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
                self._medians[key] = median(series.seconds)
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

    def by_medians(self) -> "RunTimes":
        """Return the same runs, where a prediction is their median. It must not record any."""
        view = copy(self)
        view._seconds = self._medians
        return view

    def utilization(self, keys: Keys) -> float | None:
        """Return the usual utilization of each GPU, 0 to 1; None if it is unknown."""
        if not self._utilization:
            return None
        return next((self._utilization[key] for key in keys if key in self._utilization), None)


HALF_LIFE = timedelta(hours=24)
"""The past use of a user counts half after this time."""
_REBASE_AFTER = 32.0
"""Half-lives after which the stored values are scaled down, far from the limits of a float."""


def decayed(rate: float, from_s: float, to_s: float, at_s: float, half_life_s: float) -> float:
    """Return what is left at `at_s` of `rate` bytes held from `from_s` to `to_s`."""
    decay = math.log(2) / half_life_s
    return rate / decay * (math.exp(decay * (to_s - at_s)) - math.exp(decay * (from_s - at_s)))


class PastUse:
    """The decayed use of each user by jobs that have ended."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._base_s: float | None = None
        """The instant that the stored values refer to."""
        self._values: dict[str, float] = {}

    def add(self, user: str, rate: float, from_s: float, to_s: float) -> None:
        """Add a job of `user` that held `rate` bytes; instants in seconds, in any order."""
        if self._base_s is None or to_s - self._base_s > _REBASE_AFTER * self._half_life_s:
            self._values = dict(self.at(to_s))
            self._base_s = to_s
        amount = decayed(rate, from_s, to_s, self._base_s, self._half_life_s)
        self._values[user] = self._values.get(user, 0.0) + amount

    def at(self, at_s: float) -> Mapping[str, float]:
        """Return the use of each user, decayed to an instant."""
        if self._base_s is None:
            return {}
        # A wrong clock may have left uses in the future: they do not grow until then.
        factor = 2.0 ** min(0.0, (self._base_s - at_s) / self._half_life_s)
        # A copy: a forecast reads in another thread.
        return {user: value * factor for user, value in list(self._values.items())}


class Shares:
    """The share of each user at one instant, as a factor on the cost of its jobs.

    The factor is the user's part of all use, times the number of active users: 1 for an equal
    share. The total is taken once, so that a start changes the factor of its own user only.
    """

    def __init__(self, use: Mapping[str, float], active: int, least_total: float, floor: float):
        """Take the use of each user, and how many have jobs.

        Args:
            use: the use of each user, of running jobs too.
            active: the number of users with jobs.
            least_total: the total counts as at least this, for machines without a past.
            floor: the smallest factor.
        """
        self._use = dict(use)
        self._active = max(1, active)
        self._scale = self._active / max(sum(self._use.values()), least_total)
        self._floor = floor

    def add(self, user: str, amount: float) -> None:
        """Add use of `user`, of a job that starts."""
        self._use[user] = self._use.get(user, 0.0) + amount

    def share(self, user: str) -> float:
        """Return the part of all use that is the user's."""
        return self._use.get(user, 0.0) * self._scale / self._active

    def factor(self, user: str) -> float:
        """Return the factor of `user`; above 1 for more than an equal share."""
        return max(self._floor, self._use.get(user, 0.0) * self._scale)
