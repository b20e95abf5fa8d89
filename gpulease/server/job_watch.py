"""Wakes the streams that follow a job when that job changes.

Each change is examined once for all streams. Otherwise hundreds of them would compute their job
again at each change of another job.
"""

import asyncio
import contextlib

from gpulease.domain.job import Job
from gpulease.server.context import RequestContext


class JobWatch:
    """The streams that wait for changes of jobs."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._waiting: dict[asyncio.Future[None], Job] = {}
        """What wakes each stream, and its job as the stream has seen it."""
        self._looking: asyncio.Task[None] | None = None

    async def change_of(self, job: Job, within_s: float) -> None:
        """Wait until the store has another version of `job`, for at most `within_s` seconds."""
        if self._has_changed(job):
            return
        changed = asyncio.get_running_loop().create_future()
        self._waiting[changed] = job
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="job watch")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await changed
        finally:
            del self._waiting[changed]

    async def _look(self) -> None:
        """Look at the watched jobs at each change of any job."""
        while self._waiting:
            change = self._context.scheduler.next_change
            for changed, job in self._waiting.items():
                if self._has_changed(job) and not changed.done():
                    changed.set_result(None)
            await change.wait()

    def _has_changed(self, job: Job) -> bool:
        return self._context.scheduler.store.live_job(job.id) is not job
