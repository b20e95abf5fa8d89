"""What was read about processes a moment ago."""

from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Generic, TypeVar

from gpulease.service.ports import Clock

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_OLD = timedelta(seconds=2)
_AGAIN = 8
"""Values that one answer reads again although they are not old."""


class Recent(Generic[K, V]):
    """Keeps values that are read from /proc: each reading lets other threads delay the answer.

    The first answer after a while reads all values that it needs. Answers that follow each other
    soon read the new ones and a few others, so that each is quick. For one thread.
    """

    def __init__(self, read: Callable[[K], V], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._kept: dict[K, tuple[timedelta, V]] = {}
        self._now = timedelta(0)
        self._left = 0

    def begin(self) -> None:
        """Begin an answer."""
        self._now, self._left = self._clock.steady(), _AGAIN
        oldest = self._now - _OLD
        self._kept = {key: each for key, each in self._kept.items() if each[0] > oldest}

    def of(self, key: K) -> V:
        """Return a value that is at most some seconds old."""
        kept = self._kept.get(key)
        if kept is not None:
            if not self._left:
                return kept[1]
            self._left -= 1
        value = self._read(key)
        self._kept[key] = self._now, value
        return value
