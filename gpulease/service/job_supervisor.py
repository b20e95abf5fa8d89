"""The life of each job that holds memory: launched if nobody has, and followed to its end.

Each has an asyncio task. After a restart the same tasks run for the jobs on record: there is no
second path.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome
from gpulease.domain.lease import State
from gpulease.errors import GpuleaseError, LaunchDeferred, RecordUnwritable
from gpulease.service import jobs
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import (
    Clock,
    InThread,
    Launcher,
    MainExited,
    Store,
    WorkerExited,
    WorkerExpired,
    WorkerNews,
    WorkerStarted,
)

_log = logging.getLogger(__name__)

Examine = Callable[[JobId, WorkerExited], Awaitable[jobs.Settle]]


class Changes:
    """Wakes all who wait for something about the jobs to change."""

    def __init__(self) -> None:
        self.next = asyncio.Event()
        """Set at the next change; to miss nothing, take it before looking."""

    def tell(self) -> None:
        """Wake all who wait for a change."""
        self.next.set()
        self.next = asyncio.Event()


class JobSupervisor:
    """Sees to the jobs that hold memory."""

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        clock: Clock,
        writing: InThread,
        changes: Changes,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when memory may have come free."""
        self.try_again_after_s = 5.0
        """A fault that stopped the following of a job (a full disk, say) may pass."""
        self.examine: Examine | None = None
        """Looks at how a job ended before its end is stored."""
        self.unrecorded: dict[JobId, Job] = {}
        """Jobs that were asked to go while that could not be stored, as they were to be stored."""
        self.deferred: dict[JobId, str] = {}
        """Granted jobs that may not be launched at this moment, and why; nothing more is granted
        as long as there are any."""
        self.freed_at: datetime | None = None
        """When memory last came free; a look from before still shows it in use."""
        self._store = store
        self._launcher = launcher
        self._clock = clock
        self._writing = writing
        self._changes = changes
        self._wake = wake
        self._complaints = LogOnce(_log)
        self._following: dict[JobId, asyncio.Task[None]] = {}
        self._retries: set[JobId] = set()
        """Jobs that are attended again in a moment."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_stopped = False

    def attend(self, job_id: JobId) -> None:
        """See to a job that holds memory: launch it if nobody has, and follow it to its end."""
        self._retries.discard(job_id)
        if self._has_stopped:
            return
        task = asyncio.create_task(self._attend(job_id), name=f"job {job_id}")
        self._following[job_id] = task
        task.add_done_callback(lambda done: self._left(job_id, done))

    def attend_all(self, holders: Iterable[JobId]) -> None:
        """Attend to those of `holders` that hold memory and that nothing attends to."""
        for job_id in holders:
            if job_id in self._following or job_id in self._retries:
                continue
            job = self._store.job(job_id)
            if job is not None and job.holds_memory:
                self.attend(job_id)

    def recover(self) -> int:
        """Attend to every job on record that holds memory; return how many."""
        holders = [job for job in self._store.live() if job.holds_memory]
        for job in holders:
            self.attend(job.id)
        self._wake()
        return len(holders)

    async def stop(self) -> None:
        """Launch nothing more and let go of the jobs; their shims go on without us."""
        self._has_stopped = True
        followers = [*self._following.values(), *self._tasks]
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)

    def _left(self, job_id: JobId, done: asyncio.Task[None]) -> None:
        self._following.pop(job_id, None)
        if done.cancelled() or (error := done.exception()) is None:
            self.unrecorded.pop(job_id, None)
            self._complaints.passed("follow")
            return
        if isinstance(error, LaunchDeferred):
            pass  # the reason is shown with each job that waits
        elif isinstance(error, RecordUnwritable) and error.is_in_the_log:
            _log.debug("cannot follow job %s now, trying again: %s", job_id, error)
        else:
            self._complain(job_id, error)
        self._retries.add(job_id)
        asyncio.get_running_loop().call_later(self.try_again_after_s, self.attend, job_id)

    def _complain(self, job_id: JobId, error: BaseException) -> None:
        bug = None if isinstance(error, GpuleaseError) else error
        # What is wrong with a disk or with D-Bus is met by every job, and by each once a second.
        self._complaints.say(
            "follow", f"cannot follow job {job_id} now, trying again: {error}",
            why=str(error).rpartition(": ")[2], bug=bug,
        )  # fmt: skip

    async def _attend(self, job_id: JobId) -> None:
        job = self._store.job(job_id)
        assert job is not None, "only stored jobs are granted"
        never_started = job.started_at is None and not self._launcher.was_launched(job)
        is_there = not never_started or await self._launch(job)
        if self.deferred.pop(job_id, None) is not None:
            self._wake()
        if not is_there:
            return
        async for news in self._launcher.follow(job):
            await self._hear(job_id, news)
        self.freed_at = self._clock.now()
        self._wake()

    async def _launch(self, job: Job) -> bool:
        """Start the worker; return whether there is one to follow."""
        try:
            if job.state is State.RELEASING:
                if not await self._launcher.forbid(job):
                    return True
                raise GpuleaseError("cancelled before its worker was started")
            await self._launcher.launch(job, self._store.invocation(job.id))
        except LaunchDeferred as error:
            if job.id not in self.deferred:
                _log.warning("job %s is granted and waits for its start: %s", job.id, error)
            self.deferred[job.id] = error.message
            raise
        except RecordUnwritable:
            # Nothing was started and nothing says that it was: it is tried again, see `_left`.
            raise
        except GpuleaseError as error:
            failure = error
            await self._writing(
                lambda: jobs.note_launch_failed(self._store, job.id, failure, self._clock)
            )
            self._changes.tell()
            self._wake()
            return False
        return True

    async def _hear(self, job_id: JobId, news: WorkerNews) -> None:
        """Store one piece of news."""
        settle = None
        if isinstance(news, WorkerExited):
            news = self._with_detail(job_id, news)
            settle = await self.examine(job_id, news) if self.examine is not None else None
        job = await self._writing(lambda: self._store_news(job_id, news, settle))
        self._changes.tell()
        if not isinstance(news, WorkerStarted):
            return
        if job.state is State.RELEASING:
            # Cancelled while it was being launched, or just before a restart.
            self.background(self._launcher.stop(job, why_it_goes(job)))
        elif job.claim.time_limit is not None:
            # It may have been extended while it was being launched, or just before a restart.
            self.background(self.tell_time_limit(job_id))

    def _with_detail(self, job_id: JobId, news: WorkerExited) -> WorkerExited:
        """Return an end with more to say about it, if it is the one that a job was asked for."""
        asked = self.unrecorded.get(job_id)
        fits = asked is not None and asked.outcome is news.outcome and news.detail is None
        return replace(news, detail=asked.detail) if asked is not None and fits else news

    async def tell_time_limit(self, job_id: JobId) -> None:
        """Tell the worker its time limit, until it was told the one that holds by then.

        Two extensions may be told at once and overtake each other: whoever is through looks again.
        """
        told: timedelta | None = None
        await self._launched(job_id)
        while (job := self._store.job(job_id)) is not None and job.state is State.ACTIVE:
            limit = job.claim.time_limit
            if limit is None or limit == told:
                return
            await self._launcher.set_time_limit(job, limit)
            told = limit

    async def _launched(self, job_id: JobId) -> None:
        """Wait until a job is no longer about to be launched, with what it claimed before."""
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
        """Do something beside the caller's request; a failure of it is told in the log."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done_beside)
        return task

    def _done_beside(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("something done beside a request failed", exc_info=error)


def why_it_goes(job: Job) -> str:
    """Return for what reason a job is asked to go, as its shim is told."""
    revoked = job.outcome in (Outcome.OVER_LEASE, Outcome.IDLE)
    return job.outcome.value if job.outcome and revoked else Outcome.CANCELLED.value
