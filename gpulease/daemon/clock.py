"""The machine's clock, which can be set, and a steady clock, which cannot."""

import time
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SystemClock:
    """Follows the machine's clock, but a change of that only at `follow`; until then it runs on."""

    def __init__(self) -> None:
        self._offset = self._difference()

    def now(self) -> datetime:
        """Return the current time, in UTC."""
        return _EPOCH + self._offset + self.steady()

    def steady(self) -> timedelta:
        """Return the time since boot, including suspension."""
        return timedelta(microseconds=time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)

    def set_by(self) -> timedelta:
        """Return how far the machine's clock is ahead of `now`."""
        return self._difference() - self._offset

    def thread_s(self) -> float:
        """Return the CPU time of the calling thread, in seconds."""
        return time.thread_time()

    def follow(self, by: timedelta) -> None:
        """Move on by what `set_by` returned: the clock may have been set again since then."""
        self._offset += by

    def _difference(self) -> timedelta:
        return timedelta(microseconds=self._wall_ns() // 1000) - self.steady()

    def _wall_ns(self) -> int:
        return time.time_ns()
