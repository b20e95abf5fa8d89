"""The launcher port for held leases, which have no job to launch.

A held lease ends with the process of its holder, at its time limit, or when it is released. Memory
that is still used then counts as unmanaged: gpulease did not start these processes and may not end
them, so it does not wait for them.

`WaitingClients` removes a lease from the queue when the process that waits for it has ended. After
the grant that process may end, since the lease belongs to its holder.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta

from gpulease.domain.enforcement import EnforcementLevel
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Invocation, Job, Outcome, Process
from gpulease.domain.lease import State
from gpulease.errors import GpuleaseError
from gpulease.host.process_finder import ProcessWatch, has_ended
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import Clock, WorkerExited, WorkerExpired, WorkerNews, WorkerStarted
from gpulease.service.scheduler import Scheduler

_LOOK_AGAIN_S = 60.0


class HoldLauncher:
    """Follows held leases, each from its grant to its end."""

    def __init__(
        self, clock: Clock, ends: ProcessWatch, levels: Callable[[], tuple[str, ...]] = tuple
    ) -> None:
        """`levels` are the enforcement levels of processes with the environment of a lease."""
        self._levels = levels
        self._clock = clock
        self._ends = ends
        self._holds: dict[JobId, _Hold] = {}

    async def launch(self, job: Job, invocation: Invocation) -> None:
        """Start nothing: the holder runs already."""

    async def forbid(self, job: Job) -> bool:
        """Make sure that nobody gets the lease; False if it has a holder."""
        return not self.was_launched(job)

    def was_launched(self, job: Job) -> bool:
        """Return whether the holder has the lease."""
        return job.started_at is not None

    async def follow(self, job: Job) -> AsyncIterator[WorkerNews]:
        """Yield what happens to the lease: first that it is held, last why it ended."""
        process = job.holder.process if job.holder is not None else None
        started_at = job.started_at or self._clock.now()
        hold = self._holds[job.id] = _Hold(started_at, self._clock, job.claim.time_limit)
        try:
            pid = process.pid if process is not None else None
            levels = self._levels()
            if job.holder is not None and job.holder.adopted:
                # It had no hooks when it started.
                levels = tuple(each for each in levels if each != EnforcementLevel.FRAMEWORK)
            yield WorkerStarted(pid, None, started_at, levels)
            ended = await hold.end(process, self._ends)
            if ended.outcome is Outcome.TIME_LIMIT:
                yield WorkerExpired()
            yield ended
        finally:
            if self._holds.get(job.id) is hold:
                del self._holds[job.id]

    async def stop(self, job: Job, reason: str, grace: timedelta | None = None) -> None:
        """Revoke the lease. Its holder continues."""
        # A lease that is not followed now is stopped as soon as it is: the database says so.
        if (hold := self._holds.get(job.id)) is not None:
            hold.release()

    def grace(self, job: Job) -> None:
        """Return None: the holder is not stopped."""

    async def set_time_limit(self, job: Job, limit: timedelta) -> None:
        """Let the lease be held for `limit` from its start."""
        if (hold := self._holds.get(job.id)) is not None:
            hold.set_time_limit(limit)

    async def notify(self, job: Job, text: str) -> None:
        """Write nothing: the holder's output is not known."""


class _Hold:
    """The ways in which one lease can end."""

    def __init__(self, started_at: datetime, clock: Clock, limit: timedelta | None) -> None:
        # On a clock that nobody can set. The time before a restart comes from the database.
        held_for = max(clock.now() - started_at, timedelta(0))
        self._began = clock.steady() - held_for
        self._clock = clock
        self._limit = limit
        self._changed = asyncio.Event()
        self._released = False

    def release(self) -> None:
        self._released = True
        self._changed.set()

    def set_time_limit(self, limit: timedelta) -> None:
        self._limit = limit
        self._changed.set()

    async def end(self, process: Process | None, ends: ProcessWatch) -> WorkerExited:
        """Wait for the end of the lease, and return its reason."""
        async with AsyncExitStack() as stack:
            gone = None if process is None else await stack.enter_async_context(ends.of(process))
            while True:
                if self._released:
                    return self._ended(Outcome.RELEASED, "released")
                if process is not None and gone is not None and gone.is_set():
                    why = f"its holder, process {process.pid}, has ended"
                    return self._ended(Outcome.RELEASED, why)
                left_s = self._left_s()
                if left_s is not None and left_s <= 0:
                    return self._ended(Outcome.TIME_LIMIT, "its time limit was reached")
                self._changed.clear()
                # Timers do not run while the machine is suspended.
                within_s = None if left_s is None else min(left_s, _LOOK_AGAIN_S)
                await _first_of(self._changed, gone, within_s)

    def _left_s(self) -> float | None:
        if self._limit is None:
            return None
        return (self._began + self._limit - self._clock.steady()).total_seconds()

    def _ended(self, outcome: Outcome, why: str) -> WorkerExited:
        return WorkerExited(outcome, None, self._clock.now(), why)


async def _first_of(
    changed: asyncio.Event, gone: asyncio.Event | None, within_s: float | None
) -> None:
    """Return when one of the events is set, or after `within_s` seconds."""
    events = [changed] if gone is None else [changed, gone]
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


_log = logging.getLogger(__name__)

_TRY_AGAIN_AFTER_S = 5.0
_GONE = "the process that asked for it has ended"


class WaitingClients:
    """Watches the processes that wait for a lease."""

    def __init__(self, scheduler: Scheduler, ends: ProcessWatch) -> None:
        self._scheduler = scheduler
        self._ends = ends
        self._complaints = LogOnce(_log)
        self._watches: dict[JobId, asyncio.Task[None]] = {}

    async def recover(self) -> None:
        """Watch the clients of all queued leases, and withdraw leases of clients that ended."""
        for job in self._scheduler.store.live():
            if (client := _waiting_client(job)) is None:
                continue
            if has_ended(client):
                await self._scheduler.withdraw(job.id, _GONE)
            else:
                self.watch(job)

    def watch(self, job: Job) -> None:
        """Remove `job` from the queue when the process that asked for it ends."""
        # A client repeats its request when the answer was lost: then the job is watched already.
        if (client := _waiting_client(job)) is not None and job.id not in self._watches:
            task = asyncio.create_task(
                self._watch(job.id, client), name=f"waiting client of job {job.id}"
            )
            self._watches[job.id] = task
            task.add_done_callback(lambda _: self._watches.pop(job.id, None))

    async def close(self) -> None:
        """Stop watching."""
        watches = list(self._watches.values())
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, job: JobId, client: Process) -> None:
        while self._waits(job):
            try:
                await self._until_gone_or_granted(job, client)
                self._complaints.passed("clients")
                if self._waits(job):
                    await self._scheduler.withdraw(job, _GONE)
            except (GpuleaseError, OSError) as error:
                self._complaints.say(
                    "clients", f"cannot watch the client of job {job}, trying again: {error}",
                    why=str(error),
                )  # fmt: skip
                await asyncio.sleep(_TRY_AGAIN_AFTER_S)

    async def _until_gone_or_granted(self, job: JobId, client: Process) -> None:
        async with self._ends.of(client) as gone:
            leaving = asyncio.ensure_future(gone.wait())
            try:
                while self._waits(job) and not leaving.done():
                    change = asyncio.ensure_future(self._scheduler.next_change.wait())
                    if self._waits(job):
                        await asyncio.wait((change, leaving), return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
            finally:
                leaving.cancel()

    def _waits(self, job: JobId) -> bool:
        found = self._scheduler.store.job(job)
        return found is not None and found.state is State.QUEUED


def _waiting_client(job: Job) -> Process | None:
    waits = job.holder is not None and job.state is State.QUEUED
    return job.holder.waiting_client if waits and job.holder is not None else None
