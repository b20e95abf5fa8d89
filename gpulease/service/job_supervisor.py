"""The jobs that hold memory: each is launched once, and followed to its end.

Each has an asyncio task. After a restart the same tasks follow the jobs on record.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from gpulease.domain.gpu import JobId
from gpulease.domain.job import QUEUED_AGAIN, Job, Outcome
from gpulease.domain.lease import State
from gpulease.errors import GpuleaseError, LaunchDeferred, RecordUnwritable
from gpulease.service import jobs
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import (
    Clock,
    InThread,
    JobLauncher,
    MainExited,
    Store,
    WorkerExited,
    WorkerExpired,
    WorkerNews,
    WorkerStarted,
)

_log = logging.getLogger(__name__)

LauncherOf = Callable[[Job], JobLauncher]
"""Returns the launcher of a job: that of workers, or that of leases without a job."""
SettleExit = Callable[[JobId, WorkerExited], Awaitable[jobs.Settle]]
"""Examines the end of a job before it is stored; see `job_accounting`."""

LAUNCHES_AT_ONCE = 16
"""More of them do not start sooner, and delay the answers to all users."""


class Changes:
    """Notifies all tasks that wait for a change of the jobs."""

    def __init__(self) -> None:
        self.next = asyncio.Event()
        """Set at the next change; take it before you read, to miss no change."""

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self.next.set()
        self.next = asyncio.Event()


class JobSupervisor:
    """Launches and follows the jobs that hold memory."""

    def __init__(
        self,
        store: Store,
        launcher_of: LauncherOf,
        clock: Clock,
        in_writer: InThread,
        changes: Changes,
        wake: Callable[[], None],
        settle_exit: SettleExit,
        grace_to_stop: Callable[[Job], timedelta | None],
    ) -> None:
        """`wake` wakes the scheduler, after memory was freed.

        `grace_to_stop` shortens the grace of a job that is stopped; None leaves its own.
        """
        self.try_again_after_s = 5.0
        """After a failure that may pass, such as a full disk."""
        self.launch_hangs_after_s = 2.0
        """Others then go ahead of it: the home directory may be on a dead file server."""
        self.unrecorded: dict[JobId, Job] = {}
        """Jobs that were stopped while the database could not be written, as they should be."""
        self.deferred: dict[JobId, str] = {}
        """Granted jobs that cannot be launched now, and why. Stops further grants."""
        self.freed_at: datetime | None = None
        """When memory was last freed. An earlier observation still shows it in use."""
        self._store = store
        self._launcher_of = launcher_of
        self._clock = clock
        self._in_writer = in_writer
        self._changes = changes
        self._wake = wake
        self._settle_exit = settle_exit
        self._grace_to_stop = grace_to_stop
        self._failures = LogOnce(_log)
        self._launch_slots = asyncio.Semaphore(LAUNCHES_AT_ONCE)
        self._following: dict[JobId, asyncio.Task[None]] = {}
        self._retries: set[JobId] = set()
        """Jobs with a scheduled new attempt to follow them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_stopped = False

    def attend(self, job_id: JobId) -> None:
        """Launch a job that holds memory, unless that was done, and follow it to its end."""
        self._retries.discard(job_id)
        if self._has_stopped:
            return
        task = asyncio.create_task(self._attend(job_id), name=f"job {job_id}")
        self._following[job_id] = task
        task.add_done_callback(lambda done: self._left(job_id, done))

    def attend_all(self, holders: Iterable[JobId]) -> None:
        """Attend to those of `holders` that hold memory and have no task yet."""
        for job_id in holders:
            if job_id in self._following or job_id in self._retries:
                continue
            job = self._store.job(job_id)
            if job is not None and job.holds_memory:
                self.attend(job_id)

    def recover(self) -> int:
        """Attend to every job on record that holds memory; return their number."""
        holders = self._store.holding()
        for job in holders:
            self.attend(job.id)
        self._wake()
        return len(holders)

    async def stop(self) -> None:
        """Launch no more jobs and follow none; their shims continue without the daemon."""
        self._has_stopped = True
        tasks = [*self._following.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _left(self, job_id: JobId, done: asyncio.Task[None]) -> None:
        self._following.pop(job_id, None)
        if done.cancelled() or (error := done.exception()) is None:
            self.unrecorded.pop(job_id, None)
            self._failures.passed("follow")
            return
        if isinstance(error, LaunchDeferred):
            pass  # each queued job shows the reason
        elif isinstance(error, RecordUnwritable) and error.is_in_the_log:
            _log.debug("cannot follow job %s now, trying again: %s", job_id, error)
        else:
            # A failing disk or D-Bus affects every job, each once a second.
            self._failures.say(
                "follow", f"cannot follow job {job_id} now, trying again: {error}",
                why=str(error).rpartition(": ")[2],
                bug=None if isinstance(error, GpuleaseError) else error,
            )  # fmt: skip
        self._retries.add(job_id)
        asyncio.get_running_loop().call_later(self.try_again_after_s, self.attend, job_id)

    async def _attend(self, job_id: JobId) -> None:
        job = self._store.job(job_id)
        assert job is not None, "only stored jobs are granted"
        launcher = self._launcher_of(job)
        is_there = True
        if job.started_at is None:
            async with self._launch_slot():
                is_there = launcher.was_launched(job) or await self._launch(job_id, launcher)
        if self.deferred.pop(job_id, None) is not None:
            self._wake()
        if not is_there:
            return
        async for news in launcher.follow(job):
            await self._take(job_id, news)
        self.freed_at = self._clock.now()
        self._wake()

    @asynccontextmanager
    async def _launch_slot(self) -> AsyncIterator[None]:
        """Wait for the turn of a launch: few are in flight, in the order of their grants."""
        await self._launch_slots.acquire()
        is_kept = True

        def give_back() -> None:
            nonlocal is_kept
            if is_kept:
                is_kept = False
                self._launch_slots.release()

        late = asyncio.get_running_loop().call_later(self.launch_hangs_after_s, give_back)
        try:
            yield
        finally:
            late.cancel()
            give_back()

    async def _launch(self, job_id: JobId, launcher: JobLauncher) -> bool:
        """Start the worker; return whether there is one to follow."""
        job = self._store.job(job_id)  # it may have been cancelled before its turn
        assert job is not None, "only stored jobs are granted"
        try:
            if job.state is State.RELEASING:
                if not await launcher.forbid(job):
                    return True
                raise GpuleaseError("cancelled before its worker was started")
            await launcher.launch(job, self._store.invocation(job.id))
        except LaunchDeferred as error:
            if job.id not in self.deferred:
                _log.warning("job %s has its lease but cannot start now: %s", job.id, error)
            self.deferred[job.id] = error.message
            raise
        except RecordUnwritable:
            # Nothing was started, and nothing says that it was: `_left` schedules a new attempt.
            raise
        except GpuleaseError as error:
            failure = error
            await self._in_writer(
                lambda: jobs.note_launch_failed(self._store, job.id, failure, self._clock)
            )
            self._changes.notify()
            self._wake()
            return False
        return True

    async def _take(self, job_id: JobId, news: WorkerNews) -> None:
        """Store what happened to a worker."""
        settle = None
        if isinstance(news, WorkerExited):
            news = self._with_detail(job_id, news)
            settle = await self._settle_exit(job_id, news)
        job = await self._in_writer(lambda: self._store_news(job_id, news, settle))
        self._changes.notify()
        if not isinstance(news, WorkerStarted):
            return
        if job.state is State.RELEASING:
            # It was cancelled during its launch, or just before a restart of the daemon.
            grace = self._grace_to_stop(job)
            self.background(self._launcher_of(job).stop(job, reason_to_stop(job), grace))
        elif job.claim.time_limit is not None:
            # It may have been extended during its launch, or just before a restart.
            self.background(self.send_time_limit(job_id))

    def _with_detail(self, job_id: JobId, news: WorkerExited) -> WorkerExited:
        """Return the end of a job with the detail of its stop, if that is why it ended."""
        stopped = self.unrecorded.get(job_id)
        fits = stopped is not None and stopped.outcome is news.outcome and news.detail is None
        return replace(news, detail=stopped.detail) if stopped is not None and fits else news

    async def send_time_limit(self, job_id: JobId) -> None:
        """Send the worker its time limit, again until it has the latest one.

        Two extensions may be sent at once and arrive in the other order.
        """
        sent: timedelta | None = None
        await self._launched(job_id)
        while (job := self._store.job(job_id)) is not None and job.state is State.ACTIVE:
            limit = job.claim.time_limit
            if limit is None or limit == sent:
                return
            await self._launcher_of(job).set_time_limit(job, limit)
            sent = limit

    async def _launched(self, job_id: JobId) -> None:
        """Wait for the end of a launch, which uses the time limit from before it."""
        changed = self._changes.next
        while (job := self._store.job(job_id)) is not None and job.state is State.GRANTED:
            await changed.wait()
            changed = self._changes.next

    def _store_news(self, job_id: JobId, news: WorkerNews, settle: jobs.Settle | None) -> Job:
        match news:
            case WorkerStarted():
                return jobs.note_started(self._store, job_id, news)
            case WorkerExpired():
                return jobs.note_expired(self._store, job_id, self._clock)
            case MainExited():
                return jobs.note_main_exited(self._store, job_id, news)
            case WorkerExited():
                return jobs.note_exited(self._store, job_id, news, settle)

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` without delay to a request; a failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task failed", exc_info=error)


def reason_to_stop(job: Job) -> str:
    """Return the reason for stopping a job, as its shim records it."""
    revoked = job.outcome in (Outcome.OVER_LEASE, Outcome.IDLE, *QUEUED_AGAIN)
    return job.outcome.value if job.outcome and revoked else Outcome.CANCELLED.value
