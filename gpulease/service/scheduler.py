"""The loop that grants: look, decide, commit, act, and hear what came of it.

One asyncio task plans; each job that holds memory has a task of its own, see `followers`.

One pass over the queue: plan on the readings, and commit the decision.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome, asked_to_go, grant, one_line
from gpulease.domain.lease import State, Trigger
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, plan
from gpulease.errors import RecordUnwritable
from gpulease.service import jobs, submission
from gpulease.service.clock import follow_clock
from gpulease.service.idleness import keep
from gpulease.service.job_supervisor import Changes, JobSupervisor, why_it_goes
from gpulease.service.jobs import extend
from gpulease.service.observation import Observation, Peaks, Policy, look, snapshot
from gpulease.service.ports import (
    Clock,
    Event,
    GpuProbe,
    InThread,
    Launcher,
    ProcessFinder,
    Store,
    Submission,
    Transaction,
)


def reconcile(
    store: Store,
    seen: Observation,
    policy: Policy,
    clock: Clock,
    closed: str | None = None,
    *,
    fresh: bool = True,
) -> Plan:
    """Commit what fits and return the decision; no worker may start before this returns.

    `closed` is why nothing may be granted on any GPU at this moment, or None. `fresh` False means
    that `seen` is from before this pass. A plan with grants is then returned and not committed:
    others may have taken the memory since, so the caller has to look again.
    """
    with store.write() as tx:
        at = clock.now()
        tx.add_gpus(seen.readings, at)
        jobs = {job.id: job for job in tx.live()}
        drained = tx.drained() if closed is None else {each.uuid: closed for each in seen.readings}
        decided = plan(snapshot(tuple(jobs.values()), seen, policy, drained, at))
        if decided.grants and not fresh:
            return decided
        for job_id, placement in decided.grants:
            _grant(tx, jobs[job_id], placement, Event(at, Trigger.GRANT, _where(placement)))
        for job_id in decided.gives_up:
            _give_up(tx, jobs, job_id, Event(at, Trigger.EXPIRE, "waited as long as it was to"))
    return decided


def _grant(tx: Transaction, job: Job, placement: Placement, event: Event) -> None:
    tx.save(grant(job, placement, event.at), event)


def _give_up(tx: Transaction, jobs: dict[JobId, Job], job_id: JobId, event: Event) -> None:
    ended = asked_to_go(
        jobs[job_id], Trigger.EXPIRE, Outcome.GAVE_UP, "no room came in time", event.at
    )
    if ended is not None:
        tx.save(ended, event)


def _where(placement: Placement) -> str:
    return ", ".join(uuid for uuid, _ in placement.allocations)


_log = logging.getLogger(__name__)

_TOLD_WITHIN_S = 15.0
"""A shim that does not listen, or a launch that hangs, keeps no answer back for longer."""


Obstacle = Callable[[], Awaitable[str | None]]


async def _no_obstacle() -> None:
    return None


class Scheduler:
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
        self.seen: Observation | None = None
        self.obstacle: Obstacle = _no_obstacle
        """Tells why no job can be started on this machine now."""
        self.closed: str | None = None
        """Why nothing was granted in the last pass, for whatever claim."""
        self._processes = processes
        self._launcher = launcher
        self._clock = clock
        self._writing = writing
        self._looking = looking
        self._awake = asyncio.Event()
        self._changes = Changes()
        self._look_under_way = asyncio.Lock()
        self._looks = 0
        """How many looks have begun."""
        self._seen_number = 0
        """Which of them `seen` is."""
        self.followers = JobSupervisor(store, launcher, clock, writing, self._changes, self.wake)

    async def submit(self, order: Submission) -> Job:
        """Queue a job and wake the loop. Raises as `leases.submit` does."""
        seen = await self.recent_look()
        job = await self._writing(
            lambda: submission.submit(self.store, order, seen, self.policy, self._clock)
        )
        # Behind others on every GPU, it changes nothing: a long queue costs no pass for each more.
        if self.plan is None or not self.plan.is_closed:
            self.wake()
        return job

    async def cancel(self, job_id: JobId, by: str, grace: timedelta | None = None) -> Job:
        """Cancel a job, waiting or running. Raises as `leases.cancel` does.

        `grace` may be shorter than the job's own, also for one that was cancelled before. One that
        runs is asked to go also where that cannot be put on record now: its shim notes why it went.
        """
        try:
            job = await self._writing(lambda: jobs.cancel(self.store, job_id, by, self._clock))
        except RecordUnwritable as error:
            job = self._unrecorded(job_id, error)
            changed = jobs.cancelled(job, by, self._clock.now())
            job = self._goes_unrecorded(job if changed is None else changed, error)
        self._changes.tell()
        has_begun = job.started_at is not None or self._launcher.was_launched(job)
        if job.state is State.RELEASING and has_begun:
            self.followers.background(self._launcher.stop(job, "cancelled", grace))
        self.wake()
        return job

    def grace(self, job: Job) -> timedelta | None:
        """Return how long a job has between being asked to go and being made to."""
        return self._launcher.grace(job)

    async def withdraw(self, job_id: JobId, why: str) -> None:
        """Take a job out of the queue that nobody waits for any more."""
        await self._writing(lambda: jobs.withdraw(self.store, job_id, why, self._clock))
        self._changes.tell()
        self.wake()

    async def extend(self, job_id: JobId, by: timedelta, who: str) -> Job:
        """Give a job more time, or less. Raises as `extend.extend` does."""
        job = await self._writing(lambda: extend(self.store, job_id, by, who, self._clock))
        self._changes.tell()
        if job.holds_memory:
            # Before the answer: who was promised more time has it, also if this daemon ends now.
            telling = self.followers.background(self.followers.tell_time_limit(job_id))
            await asyncio.wait({telling}, timeout=_TOLD_WITHIN_S)
        # Others in the line may expect to start at another time.
        self.wake()
        return job

    async def keep(self, job_id: JobId, span: timedelta, who: str) -> Job:
        """Let a job be idle for a while. Raises as `keep.keep` does."""
        job = await self._writing(lambda: keep(self.store, job_id, span, who, self._clock))
        self._changes.tell()
        return job

    async def tell_owner(self, job_id: JobId, text: str) -> None:
        """Put a line on record for the owner of a job, and into the job's output if it runs.

        Raises:
            RecordUnwritable: it is not on record, and there is no output to say it in.
        """
        line = one_line(text)
        try:
            await self._writing(lambda: jobs.note_notice(self.store, job_id, line, self._clock))
        except RecordUnwritable as error:
            self._unrecorded(job_id, error)
            _log.debug("%s; job %s is told in its output alone: %s", error.message, job_id, line)
        self._changes.tell()
        job = self.store.job(job_id)
        if job is not None and job.state in (State.ACTIVE, State.RELEASING):
            self.followers.background(self._launcher.notify(job, line))

    async def revoke(self, job_id: JobId, why: Outcome, detail: str, notice: str) -> None:
        """Have a running job go that may not stay; `notice` is its owner's.

        Raises:
            RecordUnwritable: nothing has changed, and there is nothing that could be stopped.
        """
        job: Job | None
        try:
            job = await self._writing(
                lambda: jobs.revoke(self.store, job_id, why, detail, self._clock)
            )
        except RecordUnwritable as error:
            before = self._unrecorded(job_id, error)
            job = asked_to_go(before, Trigger.REVOKE, why, detail, self._clock.now())
            job = job and self._goes_unrecorded(job, error)
        self._changes.tell()
        if job is not None:
            self.followers.background(self._see_off(job, one_line(notice)))

    def _unrecorded(self, job_id: JobId, error: RecordUnwritable) -> Job:
        """Return a job that can be told something though that cannot be put on record.

        Raises:
            RecordUnwritable: `error`, since there is no shim that would remember it.
        """
        job = self.store.job(job_id)
        held = job is not None and job.holds_memory and job.holder is None
        if job is None or not held or not self._launcher.was_launched(job):
            raise error
        return job

    def _goes_unrecorded(self, job: Job, error: RecordUnwritable) -> Job:
        """Note what is to be stored with the end of a job that goes, since it cannot be now."""
        self.followers.unrecorded.setdefault(job.id, job)
        _log.debug("%s; job %s is asked to go all the same: %s", error.message, job.id, job.detail)
        return job

    async def _see_off(self, job: Job, notice: str) -> None:
        await self._launcher.notify(job, notice)
        await self._launcher.stop(job, why_it_goes(job))

    @property
    def next_change(self) -> asyncio.Event:
        """Set when something about the jobs changes; to miss nothing, take it before looking."""
        return self._changes.next

    async def recent_look(self) -> Observation:
        """Return the latest look, or take the first."""
        return self.seen if self.seen is not None else await self.look()

    async def look(self) -> Observation:
        """Look at the GPUs; the look begins after this call.

        All callers that come while a look is under way share the next one.
        """
        wanted = self._looks + 1
        async with self._look_under_way:
            if self.seen is not None and self._seen_number >= wanted:
                return self.seen
            self._looks += 1
            number = self._looks
            seen = await self._looking(
                lambda: look(self.store, self.probe, self._processes, self._clock, self.seen)
            )
            self.seen, self._seen_number = seen, number
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
        """Look, decide, commit, and start what was granted.

        Nothing is granted on readings from before this pass. A pass that grants nothing on the
        recent readings takes no new ones: the timer's look wakes the loop again.
        """
        await self._follow_clock()
        closed = next(iter(self.followers.deferred.values()), None) or await self.obstacle()
        decided = None if self._is_seen_outdated() else await self._decide(closed, fresh=False)
        if decided is None or decided.grants:
            await self.look()
            decided = await self._decide(closed, fresh=True)
        self.closed = closed
        self.plan = decided
        # Not the grants alone: a pass may have failed after it committed some.
        self.followers.attend_all(decided.holders)
        self._changes.tell()
        return decided

    async def _follow_clock(self) -> None:
        by = await self._writing(lambda: follow_clock(self.store, self._clock))
        if by is not None:
            _log.warning("the clock was set by %d seconds; time limits stay", by.total_seconds())
            # What was seen before stands under another time than what comes.
            self.followers.freed_at = None
            await self.look()

    def _is_seen_outdated(self) -> bool:
        """Tell whether the recent look may show memory in use that has come free since."""
        freed_at = self.followers.freed_at
        return self.seen is None or (freed_at is not None and self.seen.at <= freed_at)

    async def _decide(self, closed: str | None, *, fresh: bool) -> Plan:
        seen = await self.recent_look()
        return await self._writing(
            lambda: reconcile(self.store, seen, self.policy, self._clock, closed, fresh=fresh)
        )
