"""The scheduler: passes over the queue, and the verbs that change what a pass decides.

One asyncio task runs the passes. Each job that holds memory has a task of its own, see
`job_supervisor`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TypeVar

from gpulease.domain.eligibility import BlockKind
from gpulease.domain.explain import UserStanding, standings
from gpulease.domain.forecast import Start
from gpulease.domain.gpu import GpuMemory, JobId
from gpulease.domain.host_memory import HostMemory
from gpulease.domain.job import Job, Outcome, asked_to_end, grant, one_line, shifted
from gpulease.domain.lease import IllegalTransition, State, Trigger
from gpulease.domain.limits import NO_LIMITS, UserLimits
from gpulease.domain.notifications import NotifyEvent
from gpulease.domain.plan import Plan, plan
from gpulease.domain.queue_options import NO_OPTIONS, QueuePause
from gpulease.domain.snapshot import ledgers
from gpulease.errors import RecordUnwritable
from gpulease.service import adoption, editing, jobs, submission
from gpulease.service.adoption import Adoption
from gpulease.service.explaining import Explainer
from gpulease.service.idleness import keep
from gpulease.service.job_supervisor import (
    Changes,
    JobSupervisor,
    LauncherOf,
    SettleExit,
    reason_to_stop,
)
from gpulease.service.jobs import extend
from gpulease.service.metrics import DURATIONS, Histogram
from gpulease.service.observation import GpuObserver, Observation, Peaks
from gpulease.service.ports import Clock, Event, InThread, Policy, Store, Submission, Transaction
from gpulease.service.queue_state import FindWindows, QueueState, no_windows
from gpulease.service.sharing import Sharing
from gpulease.service.transactions import change_jobs
from gpulease.units import format_span

T = TypeVar("T")


def reconcile(
    store: Store,
    seen: Observation,
    policy: Policy,
    clock: Clock,
    closed: str | None = None,
    *,
    fresh: bool = True,
    state: QueueState | None = None,
    predicted: Mapping[JobId, Start] = MappingProxyType({}),
    sharing: Sharing | None = None,
) -> Plan:
    """Commit the grants that fit, and return the plan. Workers start after this returns.

    Args:
        store: the jobs.
        seen: the GPUs.
        policy: the admin's settings.
        clock: the time.
        closed: why no GPU takes a lease now, or None; a pause of the queue is known here.
        fresh: whether `seen` was taken in this pass. If not, a plan with grants is returned without
            a commit: the memory may be in use by now, so the caller has to observe again.
        state: what earlier passes have learnt; None reads it from the database.
        predicted: the first start that was predicted for each waiting job, as far as known.
        sharing: what is announced to daemons of other users; its `settle` has to follow.
    """
    state = state or QueueState(store)
    with change_jobs(store) as tx:
        at = clock.now()
        tx.add_gpus(seen.readings, at)
        decided = planned(tx, seen, policy, at, closed, state)
        state.window_gpus = decided.calendar.gpus
        state.promised = decided.promised
        if decided.grants and not fresh:
            return decided
        if sharing is not None and decided.grants:
            granted = [(jobs.existing(tx, job), placement) for job, placement in decided.grants]
            if not sharing.admits(granted, seen.by_gpu):
                decided = replace(decided, grants=())
        _commit_grants(tx, decided, state, predicted, at)
        tx.note_aging(decided.aging, at)
        tx.note_aging(decided.stops_aging, None)
        for job_id in decided.gives_up:
            job = jobs.existing(tx, job_id)
            why = _why_not_yet(decided, job)
            ended = asked_to_end(job, Trigger.EXPIRE, Outcome.GAVE_UP, why, at)
            if ended is not None:
                tx.save(ended, Event(at, Trigger.EXPIRE, "its --wait time is over"))
    return decided


def _commit_grants(
    tx: Transaction,
    decided: Plan,
    state: QueueState,
    predicted: Mapping[JobId, Start],
    at: datetime,
) -> None:
    for job_id, placement in decided.grants:
        job = replace(
            jobs.existing(tx, job_id),
            predicted_run_for=state.predicted(job_id),
        )
        if (start := predicted.get(job_id)) is not None:
            job = replace(job, predicted_start_at=start.at)
            if not start.is_certain:
                job = replace(
                    job, predicted_from_at=start.earliest, predicted_until_at=start.latest
                )
        gpus = ", ".join(uuid for uuid, _ in placement.allocations)
        tx.save(grant(job, placement, at), Event(at, Trigger.GRANT, gpus))


def planned(
    tx: Transaction,
    seen: Observation,
    policy: Policy,
    at: datetime,
    closed: str | None,
    state: QueueState,
) -> Plan:
    """Return the plan for the live jobs; the arguments are those of `reconcile`."""
    closed = closed or said(tx.pause())
    drained = tx.drained() if closed is None else {each.uuid: closed for each in seen.readings}
    return plan(state.snapshot(tx.live(), seen, policy, drained, at))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What would happen if a job were submitted."""

    job: Job
    plan: Plan
    closed: str | None
    """Why no job starts now, if none does."""


class _RolledBack(Exception):
    """Ends a transaction without a change."""


def _why_not_yet(decided: Plan, job: Job) -> str:
    block = decided.blocked.get(job.id)
    if block is None:
        return "not enough memory was free in time"
    return f"{_WAS_BLOCKED[block.kind]} when its --wait time was over"


_WAS_BLOCKED = {
    BlockKind.HELD: "it was still held",
    BlockKind.BEGIN: "its begin time had not come",
    BlockKind.AFTER: "the jobs that it waited for had not ended",
    BlockKind.ARRAY: "its array ran as many elements at once as it may",
}


def said(pause: QueuePause | None) -> str | None:
    """Return a pause of the queue as the reason why no job starts."""
    return None if pause is None else str(pause)


_CLOCK_STEP = timedelta(seconds=1)
"""A smaller difference is a gradual correction of the clock (adjtime(3))."""


def is_set(clock: Clock) -> bool:
    """Return whether the machine's clock was set; follow it if it was corrected gradually."""
    by = clock.set_by()
    if abs(by) >= _CLOCK_STEP:
        return True
    clock.follow(by)
    return False


def follow_clock(store: Store, clock: Clock) -> timedelta | None:
    """Follow a change of the machine's clock; return its size, or None if there was none.

    Spans stay as long as they were, so instants on record move with the clock: a job that waits
    for an hour waits for the rest of that hour, and no age becomes negative.

    Raises:
        RecordUnwritable: nothing has changed, the clock included.
    """
    if not is_set(clock):
        return None
    by = clock.set_by()
    direction = "back" if by < timedelta(0) else "forward"
    event = Event(clock.now() + by, "clock_set", f"{direction} by {format_span(abs(by))}")
    with change_jobs(store) as tx:
        for job in tx.live():
            tx.save(shifted(job, by), event)
        for gpu, availability in tx.availabilities().items():
            tx.set_availability(gpu, availability.shifted(by))
        if (pause := tx.pause()) is not None:
            tx.set_pause(replace(pause, at=pause.at + by))
    # Not before it is on disk.
    store.flush()
    clock.follow(by)
    return by


_log = logging.getLogger(__name__)

_SHIM_ANSWERS_WITHIN_S = 15.0
"""A shim that is stopped, or a launch that hangs, delays an answer for no longer."""

_PAUSE = 2.0
"""The pause after a pass, as a multiple of the CPU time of its decisions."""

_STOPS_AT_ONCE = 32
"""Jobs that are stopped at the same time; each takes a connection to its shim."""


def _room(gpu: GpuMemory) -> tuple[object, ...]:
    """Return what a plan depends on of a GPU, besides its leases; use within a lease is not."""
    reading = gpu.reading
    return (
        gpu.uuid, gpu.allocatable, gpu.headroom, gpu.unmanaged, gpu.jobs_without_lease,
        gpu.has_unmanaged_process, gpu.has_unmanaged_compute, gpu.one_process,
        tuple(entry.excess for entry in gpu.entries),
        reading.fault, reading.compute_mode, reading.mig_mode,
        # While nothing is free, it does not matter how busy the jobs are.
        gpu.headroom and reading.utilization,
        bool(reading.neighbours),
    )  # fmt: skip


Obstacle = Callable[[], Awaitable[str | None]]
"""Returns why no job can start on this machine now, or None."""


async def no_obstacle() -> None:
    """Return None: jobs can start."""


class Scheduler:
    """Grants leases that fit, has granted jobs launched, and frees the memory of ended ones.

    A pass decides in the order of `domain.queue`. It runs after each `wake`, and at the latest
    after the span that `run` is given.
    """

    def __init__(
        self,
        store: Store,
        observer: GpuObserver,
        launcher_of: LauncherOf,
        clock: Clock,
        policy: Callable[[], Policy],
        *,
        in_writer: InThread,
        settle_exit: SettleExit,
        obstacle: Obstacle = no_obstacle,
        windows: FindWindows = no_windows,
    ) -> None:
        """`in_writer` runs all writes to the database."""
        self.store = store
        self.observer = observer
        self.plan: Plan | None = None
        """The latest."""
        self.explainer = Explainer(lambda: self.plan, clock)
        self.passes = Histogram(DURATIONS)
        """How long passes took."""
        self.failed_passes = 0
        self.closed: str | None = None
        """Why no job could start in the latest pass, or None: a pause, a shutdown, the machine."""
        self._policy = policy
        self._obstacle = obstacle
        self._launcher_of = launcher_of
        self._clock = clock
        self._in_writer = in_writer
        self._awake = asyncio.Event()
        self._expects_grant = False
        """A job was submitted that probably starts at once."""
        self._spent_s = 0.0
        """CPU time of the decisions of the latest pass."""
        self._next_pass_at = 0.0
        """By the clock of the event loop."""
        self._changes = Changes()
        self._state = QueueState(store, windows)
        self.supervisor = JobSupervisor(
            store, launcher_of, clock, in_writer, self._changes, self.wake, settle_exit,
            self._grace_to_stop,
        )  # fmt: skip

    @property
    def policy(self) -> Policy:
        """The admin's settings about leasing, as they are now."""
        return self._policy()

    @property
    def seen(self) -> Observation | None:
        """The latest observation."""
        return self.observer.latest

    @property
    def peaks(self) -> Peaks:
        """The highest use of each GPU by each running job."""
        return self.observer.peaks

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the next change of a job; take it before you read, to miss no change."""
        return self._changes.next

    # Verbs. Each is one transaction, and wakes the scheduler where a pass may decide otherwise.

    async def submit(self, new_job: Submission) -> Job:
        """Queue a job. Raises what `submission.submit` raises."""
        # The latest observation of idle GPUs may be some seconds old.
        may_wait = new_job.wait_for != timedelta(0)
        seen = await (self.observer.recent() if may_wait else self.observer.observe())
        job = await self._in_writer(
            lambda: submission.submit(
                self.store,
                new_job,
                seen,
                self.policy,
                self._clock,
                self._state,
            )
        )
        # While earlier jobs block every GPU, a pass would change nothing, except find what blocks
        # this job.
        is_plain = job.queue == NO_OPTIONS and job.state is State.QUEUED
        is_closed = self.plan is not None and self.plan.is_closed
        if not is_closed or not is_plain:
            self._expects_grant |= not is_closed
            self.wake()
        return job

    async def adopt(self, wanted: Adoption, seen: Observation) -> Job:
        """Grant a lease for a process that uses GPUs, at once. Raises what `adoption.adopt` raises.

        `seen` shows what the process uses; it is an observation of this request.
        """
        closed = await self._why_closed()
        job = await self._in_writer(lambda: self._adopt(wanted, seen, closed))
        # In `seen`, its memory is outside any lease.
        await self.observer.observe()
        self._changes.notify()
        self.wake()
        return job

    async def _change(self, call: Callable[[], T]) -> T:
        """Change jobs in the thread that writes, and wake those that wait for a change."""
        done = await self._in_writer(call)
        self._changes.notify()
        return done

    async def _why_closed(self) -> str | None:
        """Return why no job can start now, apart from a pause; None if jobs can."""
        return next(iter(self.supervisor.deferred.values()), None) or await self._obstacle()

    def _adopt(self, wanted: Adoption, seen: Observation, closed: str | None) -> Job:
        owner, key, at = wanted.submission.owner, wanted.submission.key, self._clock.now()
        # Before the transaction: a directory server may be asked for the user's groups.
        self.policy.limits(owner)
        with change_jobs(self.store) as tx:
            before = None if key is None else tx.job_by_key(owner.uid, key)
            if before is not None:
                return before
            decided = planned(tx, seen, self.policy, at, closed, self._state)
            return adoption.adopt(tx, wanted, decided, seen, self.policy, at)

    async def rehearse(self, new_job: Submission) -> Rehearsal:
        """Plan with one more job; nothing is queued.

        Raises what `submission.submit` raises.
        """
        seen = await self.observer.recent()
        closed = await self._why_closed()
        return await self._in_writer(lambda: self._rehearse(new_job, seen, closed))

    def _rehearse(self, new_job: Submission, seen: Observation, closed: str | None) -> Rehearsal:
        """Submit a job and plan, in a transaction that is rolled back."""
        with contextlib.suppress(_RolledBack), self.store.write() as tx:
            unnamed = replace(new_job, key=None)
            job = submission.queue(tx, unnamed, seen, self.policy, self._clock.now(), self._state)
            closed = closed or said(tx.pause())
            decided = planned(tx, seen, self.policy, job.submitted_at, closed, self._state)
            raise _RolledBack
        return Rehearsal(job, decided, closed)

    async def cancel(self, job_id: JobId, by: str, grace: timedelta | None = None) -> Job:
        """Cancel a job, queued or running. Raises what `jobs.cancel` raises.

        `grace` may shorten the job's own grace, also of a job that was cancelled before. A running
        job is stopped even if the database cannot be written: its shim records the reason.
        """
        try:
            job = await self._in_writer(lambda: jobs.cancel(self.store, job_id, by, self._clock))
        except RecordUnwritable as error:
            job = self._with_worker(job_id, error)
            changed = jobs.cancelled(job, by, self._clock.now())
            job = self._keep_unrecorded(job if changed is None else changed, error)
        self._changes.notify()
        self.supervisor.background(self._stop_cancelled((job,), grace))
        self.wake()
        return job

    async def cancel_all(
        self,
        chosen: Callable[[Job], bool],
        by: Callable[[Job], str],
        grace: timedelta | None = None,
    ) -> Sequence[Job]:
        """Cancel all chosen jobs that wait or run, and return them. `by` names who cancels a job.

        Raises:
            RecordUnwritable: nothing has changed. `cancel` stops running jobs even then.
        """
        changed = await self._change(lambda: jobs.cancel_all(self.store, chosen, by, self._clock))
        self.supervisor.background(self._stop_cancelled(changed, grace))
        self.wake()
        return changed

    async def _stop_cancelled(self, cancelled: Iterable[Job], grace: timedelta | None) -> None:
        """Stop the workers of those jobs that have one, some at a time."""
        turns = asyncio.Semaphore(_STOPS_AT_ONCE)

        async def stop(job: Job) -> None:
            async with turns:
                await self._launcher_of(job).stop(job, "cancelled", grace)

        leaving = [job for job in cancelled if job.state is State.RELEASING]
        await asyncio.gather(*(stop(job) for job in leaving if self._has_begun(job)))

    def _has_begun(self, job: Job) -> bool:
        # A launch that has not begun is forbidden where the job is followed.
        return job.started_at is not None or self._launcher_of(job).was_launched(job)

    async def requeue(self, job_id: JobId, by: str) -> Job:
        """Stop a running job, and queue it again at its end. Raises what `jobs.requeue` raises."""
        job = await self._change(lambda: jobs.requeue(self.store, job_id, by, self._clock))
        self._stop(
            job, f"job {job.label} is stopped by {by}, and is queued again when it has ended"
        )
        return job

    def grace(self, job: Job) -> timedelta | None:
        """Return the time between SIGTERM and SIGKILL of a job; None: it has no process."""
        own, shortened = self._launcher_of(job).grace(job), self._grace_to_stop(job)
        return own if own is None or shortened is None else min(own, shortened)

    async def edit(
        self, numbers: Collection[JobId], wanted: editing.Edit, who: str
    ) -> Sequence[editing.Edited]:
        """Change waiting jobs, all or none. Raises what `editing.edit` raises."""
        seen = await self.observer.recent()
        edited = await self._change(
            lambda: editing.edit(
                self.store, numbers, wanted, who, seen, self.policy, self._clock, self._state
            )
        )
        self.wake()
        return edited

    async def move(self, numbers: Collection[JobId], wanted: editing.Move) -> Sequence[Job]:
        """Move waiting jobs before another one. Raises what `editing.move` raises."""
        moved = await self._change(lambda: editing.move(self.store, numbers, wanted, self._clock))
        self.wake()
        return moved

    async def withdraw(self, job_id: JobId, why: str) -> None:
        """Remove a job from the queue after the process that waited for it has ended."""
        await self._change(lambda: jobs.withdraw(self.store, job_id, why, self._clock))
        self.wake()

    async def extend(
        self, job_id: JobId, by: timedelta, who: str, limits: UserLimits = NO_LIMITS
    ) -> Job:
        """Change the time limit of a job by `by`. Raises what `jobs.extend` raises."""
        job = await self._change(lambda: extend(self.store, job_id, by, who, self._clock, limits))
        if job.holds_memory:
            # The shim learns the limit before the caller gets an answer, so the answer stays true
            # if this daemon ends now.
            sending = self.supervisor.background(self.supervisor.send_time_limit(job_id))
            await asyncio.wait({sending}, timeout=_SHIM_ANSWERS_WITHIN_S)
        # The expected start of other jobs may have changed.
        self.wake()
        return job

    async def shares(self) -> Sequence[UserStanding]:
        """Return the users of the queue, in the order of their turns. Nothing is granted."""
        seen = await self.observer.recent()

        def users() -> Sequence[UserStanding]:
            live, drained, at = self.store.live(), self.store.drained(), self._clock.now()
            return standings(plan(self._state.snapshot(live, seen, self.policy, drained, at)))

        # In the writing thread, which owns the state of the queue.
        return await self._in_writer(users)

    async def keep(self, job_id: JobId, span: timedelta, who: str) -> Job:
        """Exempt a job from idle checks for `span`. Raises what `idleness.keep` raises."""
        return await self._change(lambda: keep(self.store, job_id, span, who, self._clock))

    async def notify_owner(
        self, job_id: JobId, text: str, event: NotifyEvent | None = None
    ) -> None:
        """Record a notice for the owner of a job, and write it to the output of a running job.

        It is also sent if the job asks for notifications of `event`.

        Raises:
            RecordUnwritable: it is not on record, and the job has no output.
        """
        line = one_line(text)
        try:
            await self._in_writer(
                lambda: jobs.note_notice(self.store, job_id, line, self._clock, event)
            )
        except RecordUnwritable as error:
            self._with_worker(job_id, error)
            _log.debug(
                "%s; the notice to job %s is in its output only: %s", error.message, job_id, line
            )
        self._changes.notify()
        job = self.store.job(job_id)
        if job is not None and job.state in (State.ACTIVE, State.RELEASING):
            self.supervisor.background(self._launcher_of(job).notify(job, line))

    async def revoke(self, job_id: JobId, why: Outcome, detail: str, notice: str) -> None:
        """Stop a running job that may not continue; `notice` goes to its output.

        Raises:
            RecordUnwritable: nothing has changed, and the job has no worker to stop.
        """
        job: Job | None
        try:
            job = await self._in_writer(
                lambda: jobs.revoke(self.store, job_id, why, detail, self._clock)
            )
        except RecordUnwritable as error:
            before = self._with_worker(job_id, error)
            job = asked_to_end(before, Trigger.REVOKE, why, detail, self._clock.now())
            job = job and self._keep_unrecorded(job, error)
        self._changes.notify()
        if job is not None:
            self._stop(job, notice)

    def _with_worker(self, job_id: JobId, error: RecordUnwritable) -> Job:
        """Return a job that has a shim, which can act while the database cannot be written.

        Raises:
            RecordUnwritable: `error`, since there is no shim to record the reason.
        """
        job = self.store.job(job_id)
        holds = job is not None and job.holds_memory and job.has_shim
        if job is None or not holds or not self._launcher_of(job).was_launched(job):
            raise error
        return job

    def _keep_unrecorded(self, job: Job, error: RecordUnwritable) -> Job:
        """Keep the change of a job in memory; it is stored together with the job's end."""
        self.supervisor.unrecorded.setdefault(job.id, job)
        _log.debug("%s; job %s is stopped all the same: %s", error.message, job.id, job.detail)
        return job

    def _stop(self, job: Job, notice: str) -> None:
        """Stop the worker of a job that is to end; one that starts just now is stopped then."""
        if self._has_begun(job):
            self.supervisor.background(self._notify_and_stop(job, one_line(notice)))

    async def _notify_and_stop(self, job: Job, notice: str) -> None:
        launcher = self._launcher_of(job)
        await launcher.notify(job, notice)
        await launcher.stop(job, reason_to_stop(job), self._grace_to_stop(job))

    def _grace_to_stop(self, job: Job) -> timedelta | None:
        """Return to what the grace of a job that is stopped is shortened, if it is."""
        return self.policy.queue.preemption_grace if job.outcome is Outcome.PREEMPTED else None

    def follow(self, job: Job) -> None:
        """Follow a job that was granted outside a pass, on GPUs that the queue does not have."""
        self.supervisor.attend_all((job.id,))
        self._changes.notify()

    # Passes over the queue.

    def wake(self) -> None:
        """Request a pass soon."""
        self._awake.set()

    def look(self, gpus: Sequence[GpuMemory]) -> None:
        """Request a pass if the latest plan is not about these live jobs and GPUs.

        Time alone changes little: what becomes due is found by the pass that `run` makes anyway.
        `gpus` are ledgers of the latest observation.
        """
        plan = self.plan
        if (
            plan is None
            or plan.snapshot.jobs is not self.store.live()
            or list(map(_room, gpus)) != list(map(_room, ledgers(plan.snapshot)))
            or self._host_has_more(plan)
        ):
            self.wake()

    def _host_has_more(self, plan: Plan) -> bool:
        """Tell whether the server has now what a waiting job lacked in a plan."""
        lacking = [job.claim for job in plan.waiting if job.claim.leases_host]
        lacking = [claim for claim in lacking if not plan.host.fits(claim)]
        if not lacking or self.seen is None:
            return False
        left = HostMemory.of(self.seen.host, self.policy.host, self.store.holding())
        return any(map(left.fits, lacking))

    async def run(
        self, rest_s: float | None = None, passed: Callable[[], None] = lambda: None
    ) -> None:
        """Run passes without end: one after each `wake`, at each begin time, and every `rest_s`.

        Calls `passed` after each complete pass. After an expensive one the next is delayed, so that
        passes over a long queue take a third of the time at most; it decides about all changes
        since.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rest_s(rest_s)):
                    await self._awake.wait()
            await asyncio.sleep(self._next_pass_at - asyncio.get_running_loop().time())
            self._awake.clear()
            await self.one_pass()
            self._next_pass_at = asyncio.get_running_loop().time() + _PAUSE * self._spent_s
            passed()

    def _rest_s(self, longest: float | None) -> float | None:
        """Return the seconds until the next pass: at most `longest`, or until a begin time."""
        wakes_at = None if self.plan is None else self.plan.wakes_at
        if wakes_at is None:
            return longest
        left = max(0.0, (wakes_at - self._clock.now()).total_seconds())
        return left if longest is None else min(left, longest)

    async def one_pass(self) -> Plan:
        """Observe, decide, commit, and launch the granted jobs.

        Grants are based on an observation of this pass only. A pass without grants uses the
        latest observation and takes none: the sampling timer takes one, and has the scheduler
        look at it.
        """
        begun, is_complete = self._clock.steady(), False
        try:
            decided = await self._pass()
            is_complete = True
        finally:
            self.failed_passes += not is_complete
            self.passes.observe((self._clock.steady() - begun).total_seconds())
        return decided

    async def _pass(self) -> Plan:
        if is_set(self._clock):
            await self._follow_clock()
        closed = await self._why_closed()
        self._spent_s = 0.0
        # The latest observation may show memory in use that was freed since.
        freed_at = self.supervisor.freed_at
        is_outdated = self.seen is None or (freed_at is not None and self.seen.at <= freed_at)
        observes = self._expects_grant or is_outdated
        self._expects_grant = False
        decided = None if observes else await self._decide(closed, fresh=False)
        if decided is None or decided.grants or decided.preempts:
            await self.observer.observe()
            decided = await self._decide(closed, fresh=True)
        self.closed = closed or said(self.store.pause())
        self.plan = decided
        # All holders and not only the new grants: an earlier pass may have failed after its commit.
        self.supervisor.attend_all(job.id for job in self.store.holding())
        self._changes.notify()
        for victim, winner in decided.preempts:
            await self._preempt(victim, winner)
        return decided

    async def _preempt(self, victim: JobId, winner: JobId) -> None:
        """Have a job make way; if that cannot be stored now, the next pass decides again."""
        labels = {job.id: job.label for job in self.store.live()}
        other = f"job {labels.get(winner, winner)}"
        why = f"it made way for {other}"
        notice = f"job {labels.get(victim, victim)} makes way for {other}, and is queued again"
        with contextlib.suppress(IllegalTransition):  # it has ended meanwhile
            await self.revoke(victim, Outcome.PREEMPTED, why, notice)

    async def _follow_clock(self) -> None:
        by = await self._in_writer(lambda: follow_clock(self.store, self._clock))
        if by is not None:
            seconds = by.total_seconds()
            _log.warning("the clock was set by %d seconds; time limits do not change", seconds)
            # The latest observation has a time of the old clock.
            self.supervisor.freed_at = None
            await self.observer.observe()

    async def _decide(self, closed: str | None, *, fresh: bool) -> Plan:
        seen = await self.observer.recent()

        def decide() -> Plan:
            begun_s = self._clock.thread_s()
            decided = reconcile(
                self.store,
                seen,
                self.policy,
                self._clock,
                closed,
                fresh=fresh,
                state=self._state,
                predicted=self.explainer.first_starts,
                sharing=self.observer.sharing,
            )
            self._spent_s += self._clock.thread_s() - begun_s
            return decided

        try:
            return await self._in_writer(decide)
        finally:
            # Not before the commit, which the writer makes for several calls at once.
            if self.observer.sharing is not None:
                self.observer.sharing.settle()
