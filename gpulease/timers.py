"""Every timer of the daemon. The only importer of apscheduler.

Its word for a timer's entry is *job*, which means something else everywhere else here, and so stays
inside this file.
"""

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger


class Timers:
    """Calls coroutines again and again, never twice at once, never more often after a delay."""

    def __init__(self) -> None:
        # It tells of every single run at INFO, and warns when one is left out because the one
        # before is not over, which is what is meant to happen when a driver hangs.
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._scheduler = AsyncIOScheduler(
            timezone="UTC",
            executors={"default": AsyncIOExecutor()},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )

    def every(self, span: timedelta, call: Callable[[], Awaitable[None]]) -> None:
        """Call `call` every `span`, the first time after one."""
        self._scheduler.add_job(call, IntervalTrigger(seconds=span.total_seconds(), timezone="UTC"))

    def start(self) -> None:
        """Start counting, in the running event loop."""
        self._scheduler.start()

    def stop(self) -> None:
        """Stop; a call that is under way goes on to its end."""
        self._scheduler.shutdown(wait=False)
