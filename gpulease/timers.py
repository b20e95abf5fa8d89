"""The daemon's timers, and the instants of recurring windows.

Only this module imports APScheduler, which calls a timer's entry a job.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from gpulease.errors import BadValue
from gpulease.service.log_once import LogOnce

_log = logging.getLogger(__name__)

_CHECK_CLOCK_EVERY_S = 5.0
_CLOCK_STEP_S = 1.0


def _trigger(span: timedelta) -> IntervalTrigger:
    return IntervalTrigger(seconds=span.total_seconds(), timezone="UTC")


class Timer:
    """A periodic call."""

    def __init__(self, entry: Any) -> None:
        """`entry` is a job of APScheduler."""
        self._entry = entry

    def change(self, span: timedelta) -> None:
        """Set the period to `span`."""
        self._entry.reschedule(_trigger(span))


class Timers:
    """Calls coroutines periodically: never twice at once, and without catching up after a delay."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        check_clock_every_s: float = _CHECK_CLOCK_EVERY_S,
    ) -> None:
        """`wall` and `steady` return seconds, of a clock that can be set and of one that cannot."""
        self._check_clock_every_s = check_clock_every_s
        self._wall = wall
        self._steady = steady
        self._failures = LogOnce(_log)
        # It logs every run at INFO, and warns of a run that is skipped during the previous one,
        # which is intended while a driver hangs.
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._apscheduler = AsyncIOScheduler(
            timezone="UTC",
            executors={"default": AsyncIOExecutor()},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )

    def every(self, span: timedelta, call: Callable[[], Awaitable[None]]) -> "Timer":
        """Call `call` every `span`, for the first time after one `span`."""

        async def run() -> None:
            # At its end, APScheduler cancels running calls and logs that with a traceback.
            with contextlib.suppress(asyncio.CancelledError):
                await self._call(call)

        return Timer(self._apscheduler.add_job(run, _trigger(span)))

    async def _call(self, call: Callable[[], Awaitable[None]]) -> None:
        """Log a failure of `call` once, until it succeeds or fails in another way."""
        try:
            await call()
        except Exception as error:  # noqa: BLE001  the next call is a new attempt
            self._failures.say(
                call, "a periodic call failed; trying again",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip
        else:
            self._failures.passed(call)

    def start(self) -> None:
        """Start, in the running event loop."""
        self._apscheduler.start()
        self._offset_s = self._wall() - self._steady()
        self._check_clock()

    def stop(self) -> None:
        """Stop, and cancel running calls."""
        self._next_check.cancel()
        self._apscheduler.shutdown(wait=False)

    def _check_clock(self) -> None:
        """Restart all periods if the clock was set, since APScheduler uses the time of day."""
        offset_s = self._wall() - self._steady()
        if abs(offset_s - self._offset_s) > _CLOCK_STEP_S:
            now = datetime.now(UTC)
            for entry in self._apscheduler.get_jobs():
                entry.modify(next_run_time=now + entry.trigger.interval)
        self._offset_s = offset_s
        loop = asyncio.get_running_loop()
        self._next_check = loop.call_later(self._check_clock_every_s, self._check_clock)


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
        local, today = at.astimezone(self._zone), now.astimezone(self._zone)
        if local.date() == today.date():
            return f"{local:%H:%M}"
        near = abs(local - today) < timedelta(days=6)
        return f"{local:%a %H:%M}" if near else f"{local:%Y-%m-%d %H:%M}"


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
