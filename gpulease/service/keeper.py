"""The loop that grants: look, decide, commit, act, and hear what came of it.

One asyncio task plans; each job that holds memory has a task that launches its worker if nobody has
yet, and follows it to its end. After a restart the same tasks run for the jobs on record: there is
no second path.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

from gpulease.domain.job import Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.domain.notice import one_line
from gpulease.domain.plan import Plan
from gpulease.errors import GpuleaseError, RecordUnwritable
from gpulease.service import leases
from gpulease.service.clock_set import follow_clock
from gpulease.service.extend import extend
from gpulease.service.keep import keep
from gpulease.service.look import Look, Peaks, Policy, look
from gpulease.service.ports import (
    Clock,
    GpuProbe,
    InThread,
    Launcher,
    MainExited,
    Order,
    ProcessFinder,
    Store,
    WorkerExited,
    WorkerExpired,
    WorkerNews,
    WorkerStarted,
)
from gpulease.service.reconcile import reconcile

_log = logging.getLogger(__name__)

_TRY_AGAIN_AFTER_S = 5.0
"""A fault that stopped the following of a job (a full disk, say) may pass."""
_TOLD_WITHIN_S = 15.0
"""A shim that does not listen, or a launch that hangs, keeps no answer back for longer."""

Examine = Callable[[JobId, WorkerExited], Awaitable[leases.Settle]]


class Keeper:
    """Keeps the promises: grants what fits, starts what was granted, frees what has ended."""

    def __init__(
        self,
        store: Store,
        probe: GpuProbe,
        processes: ProcessFinder,
        launcher: Launcher,
        clock: Clock,
        policy: Policy,
        *,
        writing: InThread,
        looking: InThread,
    ) -> None:
        self.store = store
        self.probe = probe
        self.policy = policy
        self.peaks = Peaks()
        self.plan: Plan | None = None
        self.seen: Look | None = None
        self._processes = processes
        self._launcher = launcher
        self._clock = clock
        self._writing = writing
        self._looking = looking
        self.examine: Examine | None = None
        """Looks at how a job ended before its end is stored."""
        self._awake = asyncio.Event()
        self._changed = asyncio.Event()
        self._freed_at: datetime | None = None
        self._look_under_way = asyncio.Lock()
        self._followers: dict[JobId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # What the server calls.

    async def submit(self, order: Order) -> Job:
        """Queue a job and wake the loop. Raises as `leases.submit` does."""
        seen = await self.recent_look()
        job = await self._writing(
            lambda: leases.submit(self.store, order, seen, self.policy, self._clock)
        )
        # Behind others on every GPU, it changes nothing: a long queue costs no pass for each more.
        if self.plan is None or not self.plan.is_closed:
            self.wake()
        return job

    async def cancel(self, job_id: JobId, by: str, grace: timedelta | None = None) -> Job:
        """Cancel a job, waiting or running. Raises as `leases.cancel` does.

        `grace` may be shorter than the job's own, also for one that was cancelled before.
        """
        job = await self._writing(lambda: leases.cancel(self.store, job_id, by, self._clock))
        self._tell()
        if job.state is State.RELEASING and self._launcher.was_launched(job):
            self._background(self._launcher.stop(job, "cancelled", grace))
        self.wake()
        return job

    def grace(self, job: Job) -> timedelta | None:
        """Return how long a job has between being asked to go and being made to."""
        return self._launcher.grace(job)

    async def withdraw(self, job_id: JobId, why: str) -> None:
        """Take a job out of the queue that nobody waits for any more."""
        await self._writing(lambda: leases.withdraw(self.store, job_id, why, self._clock))
        self._tell()
        self.wake()

    async def extend(self, job_id: JobId, by: timedelta, who: str) -> Job:
        """Give a job more time, or less. Raises as `extend.extend` does."""
        job = await self._writing(lambda: extend(self.store, job_id, by, who, self._clock))
        self._tell()
        if job.holds_memory:
            # Before the answer: who was promised more time has it, also if this daemon ends now.
            telling = self._background(self._tell_time_limit(job_id))
            await asyncio.wait({telling}, timeout=_TOLD_WITHIN_S)
        # Others in the line may expect to start at another time.
        self.wake()
        return job

    async def keep(self, job_id: JobId, span: timedelta, who: str) -> Job:
        """Let a job be idle for a while. Raises as `keep.keep` does."""
        job = await self._writing(lambda: keep(self.store, job_id, span, who, self._clock))
        self._tell()
        return job

    async def tell_owner(self, job_id: JobId, text: str) -> None:
        """Put a line on record for the owner of a job, and into the job's output if it runs.

        Raises:
            RecordUnwritable: it is not on record, and was not said.
        """
        line = one_line(text)
        await self._writing(lambda: leases.note_notice(self.store, job_id, line, self._clock))
        self._tell()
        job = self.store.job(job_id)
        if job is not None and job.state in (State.ACTIVE, State.RELEASING):
            self._background(self._launcher.notify(job, line))

    async def revoke(self, job_id: JobId, why: Outcome, detail: str, notice: str) -> None:
        """Have a running job go that may not stay; `notice` is its owner's.

        Raises:
            RecordUnwritable: nothing has changed.
        """
        job = await self._writing(
            lambda: leases.revoke(self.store, job_id, why, detail, self._clock)
        )
        self._tell()
        if job is not None:
            self._background(self._see_off(job, one_line(notice)))

    async def _see_off(self, job: Job, notice: str) -> None:
        await self._launcher.notify(job, notice)
        await self._launcher.stop(job, _why_it_goes(job))

    @property
    def next_change(self) -> asyncio.Event:
        """Set when something about the jobs changes; to miss nothing, take it before looking."""
        return self._changed

    async def recent_look(self) -> Look:
        """Return the latest look, or take the first."""
        return self.seen if self.seen is not None else await self.look()

    async def look(self) -> Look:
        """Look at the GPUs now; who comes while a look is under way gets the next one."""
        async with self._look_under_way:
            seen = await self._looking(
                lambda: look(self.store, self.probe, self._processes, self._clock)
            )
        self.seen = seen
        self.peaks.take_in(seen)
        return seen

    # The loop.

    def wake(self) -> None:
        """Ask for a pass over the queue soon."""
        self._awake.set()

    async def run(
        self, rest_s: float | None = None, passed: Callable[[], None] = lambda: None
    ) -> None:
        """Grant for ever: a pass when somebody woke the loop, and after `rest_s` in any case.

        Each pass that came to its end calls `passed`.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._awake.wait()
            self._awake.clear()
            await self.one_pass()
            passed()

    async def one_pass(self) -> Plan:
        """Look, decide, commit, and set going what was granted."""
        await self._follow_clock()
        seen = await self._look_not_older_than_what_ended()
        decided = await self._writing(lambda: reconcile(self.store, seen, self.policy, self._clock))
        self.plan = decided
        for job_id, _ in decided.grants:
            self.attend(job_id)
        self._tell()
        return decided

    async def _follow_clock(self) -> None:
        by = await self._writing(lambda: follow_clock(self.store, self._clock))
        if by is not None:
            _log.warning("the clock was set by %d seconds; time limits stay", by.total_seconds())
            # What was seen before stands under another time than what comes.
            self._freed_at = None
            await self.look()

    async def _look_not_older_than_what_ended(self) -> Look:
        """Return a look in which memory that came free is seen to be free."""
        seen = await self.recent_look()
        if self._freed_at is not None and seen.at <= self._freed_at:
            return await self.look()
        return seen

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside the caller's request; a failure of it is told in the log."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done_beside)
        return task

    def _done_beside(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("something done beside a request failed", exc_info=error)

    def _tell(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # The life of one job, from its grant to its end.

    def attend(self, job_id: JobId) -> None:
        """See to a job that holds memory: launch it if nobody has, and follow it to its end."""
        task = asyncio.create_task(self._attend(job_id), name=f"job {job_id}")
        self._followers[job_id] = task
        task.add_done_callback(lambda done: self._left(job_id, done))

    def recover(self) -> int:
        """Attend to every job on record that holds memory; return how many."""
        holders = [job for job in self.store.live() if job.holds_memory]
        for job in holders:
            self.attend(job.id)
        self.wake()
        return len(holders)

    async def stop_following(self) -> None:
        """Let go of the jobs; their shims go on without us."""
        followers = [*self._followers.values(), *self._tasks]
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)

    def _left(self, job_id: JobId, done: asyncio.Task[None]) -> None:
        self._followers.pop(job_id, None)
        if done.cancelled() or (error := done.exception()) is None:
            return
        bug = None if isinstance(error, GpuleaseError) else error
        _log.warning("cannot follow job %s now, trying again: %s", job_id, error, exc_info=bug)
        asyncio.get_running_loop().call_later(_TRY_AGAIN_AFTER_S, self.attend, job_id)

    async def _attend(self, job_id: JobId) -> None:
        job = self.store.job(job_id)
        assert job is not None, "only stored jobs are granted"
        never_started = job.started_at is None and not self._launcher.was_launched(job)
        if never_started and not await self._launch(job):
            return
        async for news in self._launcher.follow(job):
            await self._hear(job_id, news)
        self._freed_at = self._clock.now()
        self.wake()

    async def _launch(self, job: Job) -> bool:
        """Start the worker; return whether there is one to follow."""
        try:
            if job.state is State.RELEASING:
                if not await self._launcher.forbid(job):
                    return True
                raise GpuleaseError("cancelled before its worker was started")
            await self._launcher.launch(job, self.store.invocation(job.id))
        except RecordUnwritable:
            # Nothing was started and nothing says that it was: it is tried again, see `_left`.
            raise
        except GpuleaseError as error:
            failure = error
            await self._writing(
                lambda: leases.note_launch_failed(self.store, job.id, failure, self._clock)
            )
            self._tell()
            self.wake()
            return False
        return True

    async def _hear(self, job_id: JobId, news: WorkerNews) -> None:
        """Store one piece of news."""
        settle = None
        if isinstance(news, WorkerExited) and self.examine is not None:
            settle = await self.examine(job_id, news)
        job = await self._writing(lambda: self._store_news(job_id, news, settle))
        self._tell()
        if not isinstance(news, WorkerStarted):
            return
        if job.state is State.RELEASING:
            # Cancelled while it was being launched, or just before a restart.
            self._background(self._launcher.stop(job, _why_it_goes(job)))
        elif job.claim.time_limit is not None:
            # It may have been extended while it was being launched, or just before a restart.
            self._background(self._tell_time_limit(job_id))

    async def _tell_time_limit(self, job_id: JobId) -> None:
        """Tell the worker its time limit, until it was told the one that holds by then.

        Two extensions may be told at once and overtake each other: whoever is through looks again.
        """
        told: timedelta | None = None
        await self._launched(job_id)
        while (job := self.store.job(job_id)) is not None and job.state is State.ACTIVE:
            limit = job.claim.time_limit
            if limit is None or limit == told:
                return
            await self._launcher.set_time_limit(job, limit)
            told = limit

    async def _launched(self, job_id: JobId) -> None:
        """Wait until a job is no longer about to be launched, with what it claimed before."""
        changed = self.next_change
        while (job := self.store.job(job_id)) is not None and job.state is State.GRANTED:
            await changed.wait()
            changed = self.next_change

    def _store_news(self, job_id: JobId, news: WorkerNews, settle: leases.Settle | None) -> Job:
        match news:
            case WorkerStarted():
                return leases.note_started(self.store, job_id, news)
            case WorkerExpired():
                return leases.note_expired(self.store, job_id, self._clock)
            case MainExited():
                return leases.note_main_exited(self.store, job_id, news)
            case WorkerExited():
                return leases.note_exited(self.store, job_id, news, settle)


def _why_it_goes(job: Job) -> str:
    """Return for what reason a job is asked to go, as its shim is told."""
    revoked = job.outcome in (Outcome.OVER_LEASE, Outcome.IDLE)
    return job.outcome.value if job.outcome and revoked else Outcome.CANCELLED.value
