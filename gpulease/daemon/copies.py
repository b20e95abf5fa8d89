"""Sees to it that there are recent copies of the database to go back to."""

import asyncio
import logging
from datetime import timedelta
from pathlib import Path

from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.service.ports import Clock
from gpulease.store.backups import back_up, newest

_log = logging.getLogger("gpuleased")

_AT_START_AFTER = timedelta(hours=1)
"""A daemon that is started again and again shall not push out the older copies."""
_DAILY = timedelta(days=1)


class Copies:
    """Copies the database when the last copy has grown old."""

    def __init__(self, database: Path, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._complaint: str | None = None

    async def at_start(self) -> None:
        """Copy it unless that was done within the hour."""
        await self._copy_after(_AT_START_AFTER)

    async def daily(self) -> None:
        """Copy it if that was not done for a day; to be called more often than that."""
        await self._copy_after(_DAILY)

    async def _copy_after(self, span: timedelta) -> None:
        try:
            if await asyncio.to_thread(self._age_is_over, span):
                await asyncio.to_thread(back_up, self._database)
            self._complaint = None
        except RecordUnwritable as error:
            # What passes is said once; damage each time, since what can be saved grows less.
            if isinstance(error, RecordDamaged):
                _log.error("%s", error.text())
            elif error.message != self._complaint:
                _log.warning("%s; trying again", error.message)
            self._complaint = error.message

    def _age_is_over(self, span: timedelta) -> bool:
        last = newest(self._database)
        if last is None:
            return True
        age_s = self._clock.now().timestamp() - last.stat().st_mtime
        # One from the future was made before the clock was set.
        return not 0 <= age_s < span.total_seconds()
