"""The launcher port of the whole daemon: of each job the one that fits it."""

from collections.abc import AsyncIterator
from datetime import timedelta

from gpulease.domain.job import Invocation, Job
from gpulease.service.ports import Launcher, WorkerNews


class Launchers:
    """Sends jobs that run something one way, and leases that are only held another."""

    def __init__(self, workers: Launcher, holders: Launcher) -> None:
        self._workers = workers
        self._holders = holders

    def _of(self, job: Job) -> Launcher:
        return self._workers if job.holder is None else self._holders

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start the worker of `job`, at most once in its life. Raises as the port says."""
        await self._of(job).launch(job, invocation)

    async def forbid(self, job: Job) -> bool:
        """See that no launch of `job` can begin any more; False if one has begun."""
        return await self._of(job).forbid(job)

    def was_launched(self, job: Job) -> bool:
        """Tell whether a launch of `job` has begun, by this daemon or one before it."""
        return self._of(job).was_launched(job)

    def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the worker of `job`; ends with WorkerExited."""
        return self._of(job).follow(job)

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Ask the worker to go, and after a grace make it go."""
        await self._of(job).stop(job, reason, grace)

    def grace(self, job: Job) -> timedelta | None:
        """Return how long the worker has to go; None: nothing is there to be ended."""
        return self._of(job).grace(job)

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Let the worker run for `limit` from its start."""
        await self._of(job).set_time_limit(job, limit)

    async def notify(self, job: Job, text: str) -> None:
        """Write a line into the job's output, if it has one."""
        await self._of(job).notify(job, text)
