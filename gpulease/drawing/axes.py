"""The axes of charts over time: round times of the clock, and round sizes. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime, timedelta, tzinfo
else:
    from _datetime import timedelta

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(each * _MINUTE for each in (1, 2, 5, 10, 15, 30)),
    *(each * _HOUR for each in (1, 2, 3, 6, 12)),
    *(each * _DAY for each in (1, 2, 7, 14, 28, 91, 182, 364)),
)
"""Seconds between two labels of the time."""


def time_marks(
    begins_at: datetime, seconds: float, most: float, zone: tzinfo | None = None
) -> Iterator[tuple[float, str]]:
    """Yield round times after `begins_at`, about `most` of them, each with its label.

    Each is a part of the whole time, 0 to 1. Without a `zone` the labels are in local time.
    """
    step = next((each for each in _STEPS if seconds / each <= most), _STEPS[-1])
    begin = begins_at.astimezone(zone)
    midnight = begin.replace(hour=0, minute=0, second=0, microsecond=0)
    after = -((begin - midnight).total_seconds() % min(step, _DAY))
    while after <= seconds:
        if after >= 0:
            local = (begins_at + timedelta(seconds=after)).astimezone(zone)
            yield after / seconds, _time_label(local, step)
        after += step


def _time_label(local: datetime, step: int) -> str:
    if step >= _DAY:
        # Two hours: a midnight after a change of the clock is an hour early.
        return f"{local + timedelta(hours=2):%b %d}"
    if (local.hour, local.minute, local.second) == (0, 0, 0):
        return f"{local:%b %d}"
    return f"{local:%H:%M}" if step >= _MINUTE else f"{local:%H:%M:%S}"


def size_step(top: float, most: int) -> int:
    """Return the bytes between two labels of sizes up to `top`, of which there are `most`."""
    step = 1
    while top / step > most:
        step *= 2
    return step
