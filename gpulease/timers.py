"""The daemon's timers, and the instants of recurring windows.

Only this module imports APScheduler, for calls every ten seconds or less often and for calendars.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from gpulease.errors import BadValue
from gpulease.service.log_once import LogOnce
from gpulease.units import format_instant

_log = logging.getLogger(__name__)


_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""Calls are due at multiples of their period since then, so they share the moments of waking."""

Call = Callable[[], Awaitable[None]]


class Timer:
    """A call every few seconds: never twice at once, and without catching up after a delay.

    Calls are due at multiples of the period on the clock of the event loop, which nobody can set.
    So timers with periods of whole seconds share the moments at which they wake the daemon.
    """

    def __init__(self, span: timedelta, call: Call) -> None:
        self._span_s = span.total_seconds()
        self._call = _with_failures_logged(call)
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
            self._running = asyncio.get_running_loop().create_task(self._call())


def _with_failures_logged(call: Call) -> Callable[[], Coroutine[None, None, None]]:
    """Return a call that logs its failure once, until it succeeds or fails in another way."""
    failures = LogOnce(_log)

    async def call_once() -> None:
        try:
            await call()
        except Exception as error:  # noqa: BLE001  the next call is a new attempt
            failures.say(
                "call", "a periodic call failed; trying again",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip
        else:
            failures.passed("call")

    return call_once


class Timers:
    """All timers of the daemon: timers of the event loop, and jobs of APScheduler.

    APScheduler takes 0.2 ms for a call, and follows the machine's clock: after that is set back,
    its calls are late by as much. So it makes the calls that may be late, and are rare.
    """

    def __init__(self) -> None:
        self._often: list[Timer] = []
        # One call at a time; one that could not be made in time is made once, when it can be.
        self._scheduler = AsyncIOScheduler(
            timezone=UTC,
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        # Failures are logged here. APScheduler would log each cancelled call as an error.
        logging.getLogger("apscheduler").setLevel(logging.CRITICAL)

    def often(self, span: timedelta, call: Call) -> Timer:
        """Call `call` every `span`, which may be a second; for the first time after about that."""
        self._often.append(Timer(span, call))
        return self._often[-1]

    def every(self, span: timedelta, call: Call) -> None:
        """Call `call` every `span`, ten seconds or more, for the first time within that."""
        trigger = IntervalTrigger(seconds=span.total_seconds(), start_date=_EPOCH, timezone=UTC)
        self._scheduler.add_job(_with_failures_logged(call), trigger)

    def at(self, cron: str, call: Call) -> None:
        """Call `call` at recurring times of the machine, five fields of crontab(5)."""
        self._scheduler.add_job(_with_failures_logged(call), _trigger_of(cron, _MACHINE_ZONE))

    def start(self) -> None:
        """Start, in the running event loop."""
        self._scheduler.start()
        for each in self._often:
            each.start()

    def stop(self) -> None:
        """Stop, and cancel running calls."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        for each in self._often:
            each.stop()


class _MachineZone(tzinfo):
    """The machine's time zone, as the C library has it.

    APScheduler would look for the zone's file, which TZ=X3 and other values of POSIX have not.
    """

    def utcoffset(self, at: datetime | None) -> timedelta | None:
        return None if at is None else at.replace(tzinfo=None).astimezone().utcoffset()

    def dst(self, at: datetime | None) -> None:
        return None

    def tzname(self, at: datetime | None) -> None:
        return None

    def fromutc(self, at: datetime) -> datetime:
        local = at.replace(tzinfo=UTC).astimezone()
        wall = local.replace(tzinfo=None)
        is_second = wall.astimezone().utcoffset() != local.utcoffset()
        return wall.replace(tzinfo=self, fold=int(is_second))


_MACHINE_ZONE = _MachineZone()
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DAY_NUMBERS = re.compile(r"(\*|[0-7])(?:-([0-7]))?(?:/([1-7]))?", re.ASCII)
_PART = r"(?:\*|\w+(?:-\w+)?)(?:/\d+)?"
_FIELD = re.compile(rf"{_PART}(?:,{_PART})*", re.ASCII)
"""APScheduler ignores what follows a part that it can read."""
_LONGEST_CRON = 100


class LocalTime:
    """The machine's time zone: begins of recurring windows, and instants as text."""

    def __init__(self, zone: tzinfo = _MACHINE_ZONE) -> None:
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
def _trigger_of(cron: str, zone: tzinfo) -> CronTrigger:
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
        return CronTrigger.from_crontab(
            " ".join([*fields[:4], ",".join(map(_named_days, fields[4].split(",")))]), zone
        )
    except ValueError as error:
        raise BadValue(f"cannot read the times {cron!r}: {error}", hint) from error


def _named_days(part: str) -> str:
    """Return a part with names for numbers: APScheduler counts from Monday, cron from Sunday."""
    found = _DAY_NUMBERS.fullmatch(part)
    if found is None or part == "*":
        return part
    first = 0 if found[1] == "*" else int(found[1])
    last = int(found[2] or (6 if found[1] == "*" or found[3] else first))
    days = [_DAYS[number % 7] for number in range(first, last + 1, int(found[3] or 1))]
    return ",".join(days) or part
