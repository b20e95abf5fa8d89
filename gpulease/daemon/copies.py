"""Sees to it that the database is where it belongs, and that there are recent copies of it."""

import asyncio
import logging
from datetime import timedelta

from gpulease.daemon.state import StateDirectory
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.service.complaints import Complaints
from gpulease.service.ports import Clock, InThread
from gpulease.store.backups import back_up, newest
from gpulease.store.repository import SqlStore

_log = logging.getLogger("gpuleased")

_AT_START_AFTER = timedelta(hours=1)
"""A daemon that is started again and again shall not push out the older copies."""
_DAILY = timedelta(days=1)


class Copies:
    """Copies the database when the last copy has grown old."""

    def __init__(self, store: SqlStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._complaints = Complaints(_log)

    async def at_start(self) -> None:
        """Copy it unless that was done within the hour."""
        await self._copy_after(_AT_START_AFTER)

    async def daily(self) -> None:
        """Copy it if that was not done for a day; to be called more often than that."""
        await self._copy_after(_DAILY)

    async def _copy_after(self, span: timedelta) -> None:
        try:
            if await asyncio.to_thread(self._age_is_over, span):
                await asyncio.to_thread(self._back_up)
            self._complaints.passed("copy")
        except RecordUnwritable as error:
            # What passes is said once; damage each time, since what can be saved grows less.
            if isinstance(error, RecordDamaged):
                _log.error("%s", error.text())
            else:
                self._complaints.say("copy", f"{error.message}; trying again")

    def _back_up(self) -> None:
        self._store.ensure_file()
        back_up(self._store.path)

    def _age_is_over(self, span: timedelta) -> bool:
        last = newest(self._store.path)
        if last is None:
            return True
        age_s = self._clock.now().timestamp() - last.stat().st_mtime
        # One from the future was made before the clock was set.
        return not 0 <= age_s < span.total_seconds()


class FileWatch:
    """Notices within seconds that the database or the directory of the jobs was removed."""

    def __init__(self, store: SqlStore, state: StateDirectory, writing: InThread) -> None:
        self._store = store
        self._state = state
        self._writing = writing
        self._complaints = Complaints(_log)

    async def look(self) -> None:
        """Make sure of both; what is wrong is logged once."""
        try:
            await self._writing(self._store.ensure_file)
            self._complaints.passed("file")
        except RecordUnwritable as error:
            self._complaints.say("file", error.text(), level=logging.ERROR)
        try:
            await asyncio.to_thread(self._state.ensure_jobs)
            self._complaints.passed("jobs")
        except OSError as error:
            self._complaints.say("jobs", f"cannot make {self._state.jobs}: {error.strerror}")
