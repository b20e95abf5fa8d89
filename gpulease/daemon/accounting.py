"""What keeps the accounts of jobs, built and wired: reports of pools, overheads, ends, sums.

Shows looks to what hears the hooks, and writes down now and then what came of it.

The end of what a job wrote, for those who want to know why it ended.

The files are the shim's and in a directory of the daemon's, so no name in it is the user's; what
they hold is, and is taken for text of any kind.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from gpulease.daemon.housekeeping import Observer
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.errors import RecordUnwritable
from gpulease.service.job_accounting import JobAccounting
from gpulease.service.observation import Observation
from gpulease.service.ports import InThread, Store
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen, Usage
from gpulease.store.store import SqlStore
from gpulease.store.usage import Accounts, Pools

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

    async def observe(self, seen: Observation) -> None:
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


_LONGEST = 64 << 10
"""Bytes of each stream: a traceback of PyTorch or of XLA is some tens of lines."""


class LogTail:
    """Reads the ends of jobs' logs, away from the event loop."""

    def __init__(self, directory_of: Callable[[JobId], Path]) -> None:
        self._directory_of = directory_of

    async def of(self, job: JobId) -> str:
        """Return the end of both streams, or nothing where there is nothing to be read."""
        directory = self._directory_of(job)
        return await asyncio.to_thread(
            lambda: "\n".join(_tail(directory / name) for name in ("stdout", "stderr"))
        )


def _tail(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, _LONGEST, max(0, size - _LONGEST)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


class Accounting:
    """The parts that have to do with what jobs take."""

    def __init__(self, store: SqlStore, driver: Callable[[], str | None]) -> None:
        self._store = store
        self.pools = Pools(store)
        self.usage = Usage(driver, self.pools.observed())
        self.accounts = Accounts(store)

    def pools_of(self, job: Job) -> Sequence[PoolSeen]:
        """Return what is known of the pools of a job that has not ended."""
        return self.usage.of(job.id)

    def attach(
        self,
        keeper: Scheduler,
        directory_of: Callable[[JobId], Path],
        stops: Callable[[Job], bool],
        writing: InThread,
    ) -> Observer:
        """Have `keeper` settle the accounts of jobs that end; what is returned wants the looks."""
        endings = JobAccounting(keeper, LogTail(directory_of).of, self.usage.idle, stops)
        keeper.followers.examine = endings.examine
        return PoolWatch(self.usage, self.pools, self._store, writing).observe
