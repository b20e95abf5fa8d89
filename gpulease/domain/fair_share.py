"""How much of the GPUs' memory each user has used lately, and the share that this makes.

Use is memory on all GPUs times time, in byte-seconds. It decays with a half-life, so that old use
is forgotten.
"""

import math
from collections.abc import Mapping

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
