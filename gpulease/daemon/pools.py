"""Shows looks to what hears the hooks, and writes down now and then what came of it."""

import logging
from datetime import datetime, timedelta

from gpulease.errors import RecordUnwritable
from gpulease.service.look import Look
from gpulease.service.ports import InThread, Store
from gpulease.service.usage import Usage
from gpulease.store.pools import Pools

_WRITE_EVERY = timedelta(seconds=15)

_log = logging.getLogger(__name__)


class PoolWatch:
    """Watches the pools of the frameworks in all jobs."""

    def __init__(self, usage: Usage, pools: Pools, store: Store, writing: InThread) -> None:
        self._usage = usage
        self._pools = pools
        self._store = store
        self._writing = writing
        self._wrote_at: datetime | None = None

    async def observe(self, seen: Look) -> None:
        """Take in a look; every quarter of a minute, write."""
        await self._usage.observe(seen)
        since = None if self._wrote_at is None else seen.at - self._wrote_at
        if since is None or not timedelta(0) <= since < _WRITE_EVERY:
            self._wrote_at = seen.at
            await self.write()

    async def write(self) -> None:
        """Store what has changed; where that is not possible now, it is kept for the next time."""
        living = {job.id for job in self._store.live()}
        rows = self._usage.unwritten()
        # A job may have been forgotten meanwhile, with all that belongs to it.
        lasting = [row for row in rows if self._store.job(row.job) is not None]
        try:
            await self._writing(lambda: self._pools.record(lasting))
        except RecordUnwritable as error:
            _log.debug("%s; what was seen of pools is kept in memory meanwhile", error.message)
            return
        self._usage.written(rows, living)
