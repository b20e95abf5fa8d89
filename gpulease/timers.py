"""Every timer of the daemon. The only importer of apscheduler.

Its word for a timer's entry is *job*, which means something else everywhere else here, and so stays
inside this file.
"""

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

_WATCH_EVERY_S = 5.0
_CLOCK_WAS_SET_S = 1.0


def _trigger(span: timedelta) -> IntervalTrigger:
    return IntervalTrigger(seconds=span.total_seconds(), timezone="UTC")


class Timer:
    """One of the calls that come again and again."""

    def __init__(self, entry: Any) -> None:
        """`entry` is APScheduler's."""
        self._entry = entry

    def change(self, span: timedelta) -> None:
        """Call every `span` from now on."""
        self._entry.reschedule(_trigger(span))


class Timers:
    """Calls coroutines again and again, never twice at once, never more often after a delay."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wall` and `steady` tell seconds: by a clock that can be set, and by one that cannot."""
        self._wall = wall
        self._steady = steady
        self._complaints = LogOnce(_log)
        # It tells of every single run at INFO, and warns when one is left out because the one
        # before is not over, which is what is meant to happen when a driver hangs.
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._scheduler = AsyncIOScheduler(
            timezone="UTC",
            executors={"default": AsyncIOExecutor()},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )

    def every(self, span: timedelta, call: Callable[[], Awaitable[None]]) -> "Timer":
        """Call `call` every `span`, the first time after one."""

        async def run() -> None:
            # APScheduler cancels what is under way at its end, and logs that with a traceback.
            with contextlib.suppress(asyncio.CancelledError):
                await self._watched(call)

        return Timer(self._scheduler.add_job(run, _trigger(span)))

    async def _watched(self, call: Callable[[], Awaitable[None]]) -> None:
        """Log a failure of `call` once, until it passes or is another."""
        try:
            await call()
        except Exception as error:  # noqa: BLE001  it is called again, whatever it was
            self._complaints.say(
                call, "a periodic call failed; trying again",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip
        else:
            self._complaints.passed(call)

    def start(self) -> None:
        """Start counting, in the running event loop."""
        self._scheduler.start()
        self._offset_s = self._wall() - self._steady()
        self._watch()

    def stop(self) -> None:
        """Stop; a call that is under way is cancelled."""
        self._watching.cancel()
        self._scheduler.shutdown(wait=False)

    def _watch(self) -> None:
        """Set the timers anew if the clock has been set: they are kept by the time of day."""
        offset_s = self._wall() - self._steady()
        if abs(offset_s - self._offset_s) > _CLOCK_WAS_SET_S:
            now = datetime.now(UTC)
            for entry in self._scheduler.get_jobs():
                entry.modify(next_run_time=now + entry.trigger.interval)
        self._offset_s = offset_s
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(_WATCH_EVERY_S, self._watch)
