"""The daemon's clock, which follows the machine's by as much as was looked at."""

import time
from datetime import timedelta

from gpulease.daemon.clock import SystemClock
from gpulease.service.scheduler import is_set

HOUR = timedelta(hours=1)


class SetWhileItIsRead(SystemClock):
    """A machine whose clock is set by an hour right after each look at it."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)
        super().__init__()

    def _wall_ns(self) -> int:
        now = time.time_ns() + int(self.ahead.total_seconds() * 1e9)
        self.ahead += HOUR
        return now


def test_a_clock_that_is_set_right_after_a_look_is_found_at_the_next() -> None:
    clock = SetWhileItIsRead()
    clock.ahead = timedelta(0)
    assert not is_set(clock)
    clock.ahead = HOUR
    assert is_set(clock), "following what was not looked at would have lost the hour"


def test_only_what_was_looked_at_is_followed() -> None:
    clock = SetWhileItIsRead()
    clock.ahead = HOUR
    by = clock.set_by()
    clock.follow(by)
    clock.ahead = 2 * HOUR
    assert abs(clock.set_by() - HOUR) < timedelta(seconds=1)
