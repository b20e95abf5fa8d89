"""Takes a lease out of the queue when the process that waits for it has gone.

Once it is granted the lease is its holder's, and whoever asked for it may go.
"""

import asyncio
import logging

from gpulease.daemon.living import Ends, has_ended
from gpulease.domain.hold import Process
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.errors import GpuleaseError
from gpulease.service.complaints import Complaints
from gpulease.service.keeper import Keeper

_log = logging.getLogger(__name__)

_TRY_AGAIN_AFTER_S = 5.0
_GONE = "the process that asked for it has ended"


class Askers:
    """Watches the processes that wait for a lease."""

    def __init__(self, keeper: Keeper, ends: Ends) -> None:
        self._keeper = keeper
        self._ends = ends
        self._complaints = Complaints(_log)
        self._watches: dict[JobId, asyncio.Task[None]] = {}

    async def recover(self) -> None:
        """Watch for every lease on record that is waited for; drop those of who left meanwhile."""
        for job in self._keeper.store.live():
            if (asker := _asker(job)) is None:
                continue
            if has_ended(asker):
                await self._keeper.withdraw(job.id, _GONE)
            else:
                self.watch(job)

    def watch(self, job: Job) -> None:
        """See to it that `job` leaves the queue with the process that asked for it."""
        # Watched already: the same order once more, since the answer was lost.
        if (asker := _asker(job)) is not None and job.id not in self._watches:
            task = asyncio.create_task(self._watch(job.id, asker), name=f"asker of job {job.id}")
            self._watches[job.id] = task
            task.add_done_callback(lambda _: self._watches.pop(job.id, None))

    async def close(self) -> None:
        """Watch no more."""
        watches = list(self._watches.values())
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, job: JobId, asker: Process) -> None:
        while self._waits(job):
            try:
                await self._until_gone_or_granted(job, asker)
                self._complaints.passed("askers")
                if self._waits(job):
                    await self._keeper.withdraw(job, _GONE)
            except (GpuleaseError, OSError) as error:
                self._complaints.say(
                    "askers", f"cannot see who waits for job {job}, trying again: {error}",
                    why=str(error),
                )  # fmt: skip
                await asyncio.sleep(_TRY_AGAIN_AFTER_S)

    async def _until_gone_or_granted(self, job: JobId, asker: Process) -> None:
        async with self._ends.of(asker) as gone:
            leaving = asyncio.ensure_future(gone.wait())
            try:
                while self._waits(job) and not leaving.done():
                    change = asyncio.ensure_future(self._keeper.next_change.wait())
                    if self._waits(job):
                        await asyncio.wait((change, leaving), return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
            finally:
                leaving.cancel()

    def _waits(self, job: JobId) -> bool:
        found = self._keeper.store.job(job)
        return found is not None and found.state is State.QUEUED


def _asker(job: Job) -> Process | None:
    waits = job.holder is not None and job.state is State.QUEUED
    return job.holder.asker if waits and job.holder is not None else None
