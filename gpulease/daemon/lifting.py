"""Takes the driver's limits away at the end of jobs, before their cgroups are removed."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from gpulease.domain.memory import GpuUuid, JobId
from gpulease.process import cgroups
from gpulease.service.complaints import Complaints
from gpulease.service.limiting import MemoryLimiter, NotLimited

_log = logging.getLogger(__name__)


class Lifting:
    """Lifts limits; where a cgroup has gone already, so have its limits."""

    def __init__(self, limiter: MemoryLimiter | None, has_scope: Callable[[JobId], bool]) -> None:
        """`limiter` also where no limit is to be set any more; `has_scope`: one of our making."""
        self._limiter = limiter
        self._has_scope = has_scope
        self._complaints = Complaints(_log)

    async def of(self, job: JobId, gpus: Iterable[GpuUuid]) -> None:
        """Lift the limits of a job of which no process is left."""
        if self._limiter is None or not self._has_scope(job):
            return
        directory = await asyncio.to_thread(cgroups.directory_of, job)
        if directory is not None:
            await self._lift(job, directory, gpus)

    async def of_all_but(self, live: Collection[JobId], gpus: Collection[GpuUuid]) -> None:
        """Lift what jobs have left that ended while no daemon was there."""
        if self._limiter is None:
            return
        for number, directory in await asyncio.to_thread(lambda: list(cgroups.scopes())):
            if number not in live and self._has_scope(JobId(number)):
                await self._lift(JobId(number), directory, gpus)

    async def _lift(self, job: JobId, directory: Path, gpus: Iterable[GpuUuid]) -> None:
        assert self._limiter is not None
        for gpu in gpus:
            try:
                await asyncio.to_thread(self._limiter.lift, gpu, directory)
                self._complaints.passed(gpu)
            except NotLimited as failure:
                if directory.exists():
                    text = f"job {job}: its limit on {gpu} is not lifted: {failure}"
                    self._complaints.say(gpu, text, why=str(failure))
