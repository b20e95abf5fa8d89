"""Looks after a restart whether the driver still keeps running jobs to their limits.

What it has dropped is set again; where that cannot be, the lease is on record as one that the
driver does not hold, and its owner is told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from gpulease.domain.job import Job
from gpulease.domain.lease import Lease
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.process import cgroups
from gpulease.service.complaints import Complaints
from gpulease.service.limiting import MemoryLimiter, NotLimited

_log = logging.getLogger(__name__)

_SHORT_UUID = len("GPU-12345678")

Note = Callable[[JobId, Mapping[GpuUuid, int | None], str], Awaitable[object]]
"""Stores the limits that a job has now, None for none, and what is to be said of it."""
Tell = Callable[[JobId, str], Awaitable[object]]
"""Tells the owner of a job."""


class Renewing:
    """Reads the limits of running jobs back."""

    def __init__(
        self, limiter: MemoryLimiter | None, has_scope: Callable[[JobId], bool], note: Note
    ) -> None:
        """`has_scope` says that the scope of this name is one of our making."""
        self._limiter = limiter
        self._has_scope = has_scope
        self._note = note
        self._complaints = Complaints(_log)

    async def of(self, jobs: Iterable[Job], tell: Tell) -> None:
        """Look at the limits of those of `jobs` that are on record as limited by the driver.

        Raises:
            RecordUnwritable: what was found cannot be stored now.
        """
        if self._limiter is None:
            return
        for job in jobs:
            limited = [lease for lease in job.leases if lease.driver_limit is not None]
            directory = await asyncio.to_thread(cgroups.directory_of, job.id) if limited else None
            if directory is None or not self._has_scope(job.id):
                continue
            # Of one that ended meanwhile what is left is lifted at its end.
            if await asyncio.to_thread(cgroups.members, job.id):
                await self._renew(job, limited, directory, tell)

    async def _renew(self, job: Job, leases: Iterable[Lease], directory: Path, tell: Tell) -> None:
        answers = await asyncio.gather(
            *(asyncio.to_thread(self._again, job.id, lease, directory) for lease in leases)
        )
        changed = {gpu: now for gpu, now, _ in (each for each in answers if each is not None)}
        said = "; ".join(why for _, _, why in (each for each in answers if each is not None))
        if not changed:
            return
        _log.warning("job %s: %s", job.id, said)
        await self._note(job.id, changed, said)
        if None in changed.values():
            await tell(job.id, said)

    def _again(
        self, job: JobId, lease: Lease, directory: Path
    ) -> tuple[GpuUuid, int | None, str] | None:
        """Set the limit of a lease again; return what it is now, and why. None: it still stands."""
        assert self._limiter is not None
        gpu = lease.gpu
        try:
            kept = self._limiter.kept(gpu, directory)
        except NotLimited as failure:
            # It may be in force or not: what is on record is of the launch.
            text = f"job {job}: its limit on {gpu} cannot be read back: {failure}"
            self._complaints.say(gpu, text, why=str(failure))
            return None
        if kept is not None and kept <= lease.memory:
            return None
        short = gpu[:_SHORT_UUID]
        try:
            now = self._limiter.limit(gpu, directory, lease.memory)
        except NotLimited as failure:
            return gpu, None, f"the driver limits it no more on {short}: {failure}"
        return gpu, now, f"the driver had dropped its limit on {short}, which is set again"
