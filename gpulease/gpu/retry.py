"""When to try again: pauses that double from one attempt to the next, while something is wrong."""

from datetime import timedelta

from gpulease.gpu.lane import Monotonic


class Retry:
    """The time of the next attempt, if there is to be one."""

    def __init__(self, first: timedelta, clock: Monotonic) -> None:
        self._first = first.total_seconds()
        self._pause = self._first
        self._at: float | None = None
        self._clock = clock

    @property
    def is_due(self) -> bool:
        """Say whether it is time for an attempt."""
        return self._at is not None and self._clock() >= self._at

    def wanted(self, longest: timedelta) -> None:
        """Plan an attempt after the current pause, unless one is planned already."""
        if self._at is None:
            self._at = self._clock() + min(self._pause, longest.total_seconds())
            self._pause = min(self._pause * 2, longest.total_seconds())

    def begun(self) -> None:
        """Take the planned attempt off; the next pause will be longer."""
        self._at = None

    def needless(self) -> None:
        """Forget about it: all is well, and the next trouble starts with the first pause."""
        self._at = None
        self._pause = self._first
