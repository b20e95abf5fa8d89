"""Reads what jobs report and write: the pools of their frameworks, and the ends of their logs."""

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from gpulease.domain.gpu import JobId
from gpulease.errors import RecordUnwritable
from gpulease.service.observation import Observation
from gpulease.service.ports import InThread, Store
from gpulease.service.usage import Usage
from gpulease.store.usage import PoolUsage

_WRITE_EVERY = timedelta(seconds=15)

_log = logging.getLogger(__name__)


class PoolWatch:
    """Combines reports of pools with observations, and stores the results at intervals."""

    def __init__(self, usage: Usage, pools: PoolUsage, store: Store, in_writer: InThread) -> None:
        self._usage = usage
        self._pools = pools
        self._store = store
        self._in_writer = in_writer
        self._wrote_at: datetime | None = None

    async def observe(self, seen: Observation) -> None:
        """Add an observation; write every 15 seconds."""
        await self._usage.observe(seen)
        since = None if self._wrote_at is None else seen.at - self._wrote_at
        if since is None or not timedelta(0) <= since < _WRITE_EVERY:
            self._wrote_at = seen.at
            await self.write()

    async def write(self) -> None:
        """Store what has changed; after a failure, the next call stores it."""
        live = {job.id for job in self._store.live()}
        rows = self._usage.unwritten()
        # Retention may have removed a job in the meantime.
        on_record = [row for row in rows if self._store.job(row.job) is not None]
        try:
            await self._in_writer(lambda: self._pools.record(on_record))
        except RecordUnwritable as error:
            _log.debug("%s; the pools stay in memory", error.message)
            return
        self._usage.written(rows, live)


_MOST_READ = 64 << 10
"""Bytes of each stream: a traceback of PyTorch or XLA has some tens of lines."""


class LogTail:
    """Reads the ends of jobs' logs, in a thread.

    The files are in a directory of the daemon, so their names do not come from the user. Their
    content does, and may be any bytes.
    """

    def __init__(self, directory_of: Callable[[JobId], Path]) -> None:
        self._directory_of = directory_of

    async def of(self, job: JobId) -> str:
        """Return the end of both streams; empty where they cannot be read."""
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
        return os.pread(fd, _MOST_READ, max(0, size - _MOST_READ)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
