"""The daemon's timers. Only this module imports APScheduler, which calls a timer's entry a job."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

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
