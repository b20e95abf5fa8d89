"""The daemon's timers, and the instants of recurring windows.

Only this module imports APScheduler, for the instants of cron expressions.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache

from apscheduler.triggers.cron import CronTrigger

from gpulease.errors import BadValue
from gpulease.service.log_once import LogOnce
from gpulease.units import format_instant

_log = logging.getLogger(__name__)


class Timer:
    """A periodic call: never twice at once, and without catching up after a delay.

    Calls are due at multiples of the period on the clock of the event loop, which nobody can set.
    So timers with periods of whole seconds share the moments at which they wake the daemon.
    """

    def __init__(self, span: timedelta, call: Callable[[], Awaitable[None]]) -> None:
        self._span_s = span.total_seconds()
        self._call = call
        self._failures = LogOnce(_log)
        self._next: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def change(self, span: timedelta) -> None:
        """Set the period to `span`."""
        self._span_s = span.total_seconds()
        if self._next is not None:
            self.start()

    def start(self) -> None:
        """Plan the next call, in the running event loop."""
        self._cancel_next()
        loop = asyncio.get_running_loop()
        # Later than now by more than half a period: a call that is a little early is not repeated.
        periods = round(loop.time() / self._span_s) + 1
        self._next = loop.call_at(periods * self._span_s, self._run)

    def _cancel_next(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def stop(self) -> None:
        """Make no more calls, and cancel one that is running."""
        self._cancel_next()
        if self._running is not None:
            self._running.cancel()

    def _run(self) -> None:
        self.start()
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._call_once())

    async def _call_once(self) -> None:
        """Log a failure of the call once, until it succeeds or fails in another way."""
        try:
            await self._call()
        except Exception as error:  # noqa: BLE001  the next call is a new attempt
            self._failures.say(
                "call", "a periodic call failed; trying again",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip
        else:
            self._failures.passed("call")


class Timers:
    """All timers of the daemon."""

    def __init__(self) -> None:
        self._timers: list[Timer] = []

    def every(self, span: timedelta, call: Callable[[], Awaitable[None]]) -> Timer:
        """Call `call` every `span`, for the first time after about one `span`."""
        self._timers.append(Timer(span, call))
        return self._timers[-1]

    def start(self) -> None:
        """Start, in the running event loop."""
        for each in self._timers:
            each.start()

    def stop(self) -> None:
        """Stop, and cancel running calls."""
        for each in self._timers:
            each.stop()


_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DAY_NUMBERS = re.compile(r"(\*|[0-7])(?:-([0-7]))?(?:/([1-7]))?", re.ASCII)
_PART = r"(?:\*|\w+(?:-\w+)?)(?:/\d+)?"
_FIELD = re.compile(rf"{_PART}(?:,{_PART})*", re.ASCII)
"""APScheduler ignores what follows a part that it can read."""
_LONGEST_CRON = 100


class LocalTime:
    """The machine's time zone: begins of recurring windows, and instants as text."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        """Take the machine's time zone, or another one."""
        self._zone = zone

    def next(self, cron: str, at: datetime) -> datetime | None:
        """Return the first begin at or after `at`, in UTC; None: there is none.

        A time that a change of the clocks skips counts an hour later, and one that it repeats
        counts the first time.

        Raises:
            BadValue: `cron` is not five fields of crontab(5).
        """
        trigger = _trigger_of(cron, self._zone)
        while (found := trigger.get_next_fire_time(None, at)) is not None and found.fold:
            at = found.astimezone(UTC) + timedelta(microseconds=1)
        return None if found is None else found.astimezone(UTC)

    def text(self, at: datetime, now: datetime) -> str:
        """Return an instant for people, without the day if that is today."""
        return format_instant(at.astimezone(self._zone), now.astimezone(self._zone))


@lru_cache(maxsize=64)
def _trigger_of(cron: str, zone: tzinfo | None) -> CronTrigger:
    fields = cron.lower().split() if len(cron) <= _LONGEST_CRON else []
    hint = "write five fields: minute, hour, day, month, weekday, as '0 22 * * mon-fri'"
    if len(fields) != 5 or not all(map(_FIELD.fullmatch, fields)):
        raise BadValue(
            f"cannot read the times {cron[:40]!r}: they are not five fields of crontab(5)", hint
        )
    if fields[2] != "*" and fields[4] != "*":
        # crontab(5) joins the two by "or", APScheduler by "and".
        raise BadValue(
            f"cannot use the times {cron!r}: they restrict both the day and the weekday",
            "make two windows, one for the days and one for the weekdays",
        )
    try:
        return CronTrigger.from_crontab(" ".join([*fields[:4], _weekdays(fields[4])]), zone)
    except ValueError as error:
        raise BadValue(f"cannot read the times {cron!r}: {error}", hint) from error


def _weekdays(field: str) -> str:
    """Return a field with names for numbers: APScheduler counts from Monday, cron from Sunday."""
    return ",".join(_named_days(part) for part in field.split(","))


def _named_days(part: str) -> str:
    found = _DAY_NUMBERS.fullmatch(part)
    if found is None or part == "*":
        return part
    first = 0 if found[1] == "*" else int(found[1])
    last = int(found[2] or (6 if found[1] == "*" or found[3] else first))
    days = [_DAYS[number % 7] for number in range(first, last + 1, int(found[3] or 1))]
    return ",".join(days) or part
