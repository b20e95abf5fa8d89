"""The verbs on a job: submit, cancel, and what happens to its worker. A transaction each.

More time for a job, or less: its limit counts from its start, before and after.

Noting what holds a job to its leases: at its launch, before the first of its processes.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta

from gpulease.domain.enforcement import AppliedEnforcement, with_driver_limits, with_enforcement
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import (
    Exit,
    Job,
    Outcome,
    asked_to_go,
    back_in_queue,
    main_exited,
    with_time_limit,
    worker_gone,
    worker_started,
)
from gpulease.domain.lease import LONGEST_TIME, IllegalTransition, State, Trigger
from gpulease.errors import BadValue, GpuleaseError, NoSuchJob, WrongState
from gpulease.service.ports import (
    Clock,
    Event,
    MainExited,
    Store,
    Transaction,
    WorkerExited,
    WorkerStarted,
)
from gpulease.units import format_size, format_span

Settle = Callable[[Transaction, Job, Job], Job]
"""Settles the account of a job, as it was and as it ended, within the transaction of its end."""


def cancel(store: Store, job_id: JobId, by: str, clock: Clock) -> Job:
    """End a waiting job, or mark a running one as asked to go; the caller stops its worker.

    Raises:
        NoSuchJob: there is none.
        WrongState: it has ended.
    """
    with store.write() as tx:
        job = existing(tx, job_id)
        at = clock.now()
        changed = cancelled(job, by, at)
        if changed is None:
            return job
        tx.save(changed, Event(at, Trigger.CANCEL, f"by {by}"))
    return changed


def cancelled(job: Job, by: str, at: datetime) -> Job | None:
    """Return a job as it is when it was cancelled; None: it is on its way out by now.

    Raises:
        WrongState: it has ended.
    """
    given_back = job.holder is not None and job.state is State.ACTIVE and by == job.owner.user
    outcome = Outcome.RELEASED if given_back else Outcome.CANCELLED
    try:
        return asked_to_go(job, Trigger.CANCEL, outcome, f"{outcome} by {by}", at)
    except IllegalTransition:
        raise WrongState(
            f"cannot cancel job {job.id}: it has ended",
            f"gpulease show {job.id} tells how",
        ) from None


def revoke(store: Store, job_id: JobId, why: Outcome, detail: str, clock: Clock) -> Job | None:
    """Mark a running job as asked to go; None if it is on its way out by now."""
    with store.write() as tx:
        job = existing(tx, job_id)
        at = clock.now()
        changed = asked_to_go(job, Trigger.REVOKE, why, detail, at)
        if changed is not None:
            tx.save(changed, Event(at, Trigger.REVOKE, detail.partition("\n")[0]))
    return changed


def withdraw(store: Store, job_id: JobId, why: str, clock: Clock) -> Job:
    """Take a job out of the queue that nobody waits for any more; a granted one stays."""
    with store.write() as tx:
        job = existing(tx, job_id)
        at = clock.now()
        if job.state is not State.QUEUED:
            return job
        changed = asked_to_go(job, Trigger.CANCEL, Outcome.CANCELLED, why, at)
        assert changed is not None, "one that waits can always be cancelled"
        tx.save(changed, Event(at, Trigger.CANCEL, why))
    return changed


def note_started(store: Store, job_id: JobId, news: WorkerStarted) -> Job:
    """Store that the worker of a job runs; hearing it twice does no harm."""
    with store.write() as tx:
        job = existing(tx, job_id)
        changed = worker_started(job, news.pid, news.shim_pid, news.at)
        if changed is None:
            return job
        if any(lease.enforced_by is None for lease in job.leases):
            changed = with_enforcement(changed, news.rungs)
        held_by = None if news.pid is None else f"pid {news.pid}"
        tx.save(changed, Event(news.at, Trigger.WORKER_STARTED, held_by))
    return changed


def note_expired(store: Store, job_id: JobId, clock: Clock) -> Job:
    """Store that the worker was asked to go because its time is over."""
    with store.write() as tx:
        job = existing(tx, job_id)
        at = clock.now()
        limit = "its time limit is over"
        changed = asked_to_go(job, Trigger.EXPIRE, Outcome.TIME_LIMIT, limit, at)
        if changed is None:
            return job
        tx.save(changed, Event(at, Trigger.EXPIRE, limit))
    return changed


def note_main_exited(store: Store, job_id: JobId, news: MainExited) -> Job:
    """Store that the main process has ended and others of the job have not."""
    with store.write() as tx:
        job = existing(tx, job_id)
        changed = main_exited(job, news.exit, news.at)
        if changed is None:
            return job
        how = f"{news.exit}; other processes of the job still run"
        tx.save(changed, Event(news.at, "main_exited", how))
    return changed


def note_exited(
    store: Store, job_id: JobId, news: WorkerExited, settle: Settle | None = None
) -> Job:
    """Store how a job ended; from here its memory is free.

    `settle` may add to the ended job, and to what is committed with it.
    """
    with store.write() as tx:
        job = existing(tx, job_id)
        outcome, detail = news.outcome, news.detail
        gone_as_asked = outcome in (job.outcome, Outcome.LOST) or job.holder is not None
        if job.outcome is not None and gone_as_asked:
            # It was asked to go and is gone: that is why, even if nobody saw it go. And a lease
            # that only was held has no end of its own.
            outcome, detail = job.outcome, job.detail
        changed = worker_gone(job, Trigger.WORKER_EXITED, outcome, detail, news.exit, news.at)
        if changed is None:
            return job
        if settle is not None:
            changed = settle(tx, job, changed)
        how = news.outcome if job.holder is None else outcome
        tx.save(changed, Event(news.at, Trigger.WORKER_EXITED, how))
    return changed


def note_launch_failed(store: Store, job_id: JobId, why: GpuleaseError, clock: Clock) -> Job:
    """Store that no worker of the job ever came, and why."""
    with store.write() as tx:
        job = existing(tx, job_id)
        at = clock.now()
        if job.outcome is None:
            how = Outcome.LAUNCH_FAILED, why.text(), Exit(why.exit_code)
        else:
            # Cancelled before it was started: that is why there is no worker.
            how = job.outcome, job.detail or why.text(), Exit()
        changed = worker_gone(job, Trigger.LAUNCH_FAILED, *how, at)
        if changed is None:
            return job
        tx.save(changed, Event(at, Trigger.LAUNCH_FAILED, why.message))
    return changed


def take_back_grants(store: Store, was_launched: Callable[[Job], bool], clock: Clock) -> int:
    """Queue the jobs again that were granted before a reboot and never launched; return how many.

    Only after a reboot: until then, a shim of a former daemon may be about to launch one.
    """
    never = [
        job
        for job in store.live()
        if job.state is State.GRANTED and job.holder is None and not was_launched(job)
    ]
    if never:
        with store.write() as tx:
            for job in never:
                why = "the machine was restarted before the job was started"
                tx.save(back_in_queue(job), Event(clock.now(), Trigger.LAUNCH_DEFERRED, why))
    return len(never)


def note_notice(store: Store, job_id: JobId, text: str, clock: Clock) -> None:
    """Store what the owner of a job was told; the job may have ended."""
    with store.write() as tx:
        existing(tx, job_id)
        tx.note(job_id, Event(clock.now(), "notice", text))


def existing(tx: Transaction, job_id: JobId) -> Job:
    """Return a job.

    Raises:
        NoSuchJob: there is none.
    """
    job = tx.job(job_id)
    if job is None:
        raise NoSuchJob(
            f"cannot find job {job_id}: there is none", "gpulease list --all shows them"
        )
    return job


_SHORTEST_TIME = timedelta(seconds=1)


def extend(store: Store, job_id: JobId, by: timedelta, who: str, clock: Clock) -> Job:
    """Add `by`, which may be negative, to the time limit of a job; the caller tells its worker.

    Raises:
        NoSuchJob: there is none.
        WrongState: it has ended or was asked to go, or has no limit.
        BadValue: the new limit would be over already, or is past all bounds.
    """
    with store.write() as tx:
        job = existing(tx, job_id)
        at = clock.now()
        limit = _new_limit(job, by)
        _refuse_what_is_over(job, by, limit, at)
        changed = with_time_limit(job, limit)
        tx.save(changed, Event(at, "extend", f"by {_signed(by)} to {format_span(limit)}, by {who}"))
    return changed


def _new_limit(job: Job, by: timedelta) -> timedelta:
    hint = f"gpulease show {job.id} tells how it stands"
    if job.state is State.ENDED:
        raise WrongState(f"cannot extend job {job.id}: it has ended", hint)
    if job.state is State.RELEASING:
        raise WrongState(f"cannot extend job {job.id}: it was asked to go already", hint)
    if job.claim.time_limit is None:
        raise WrongState(
            f"cannot extend job {job.id}: it has no time limit",
            f"it may go on as long as it likes; gpulease cancel {job.id} ends it",
        )
    return job.claim.time_limit + by


def _refuse_what_is_over(job: Job, by: timedelta, limit: timedelta, at: datetime) -> None:
    if limit > LONGEST_TIME:
        raise BadValue(
            f"cannot extend job {job.id} by {_signed(by)}: that is over {LONGEST_TIME.days} days",
            "give it less; it can be extended again",
        )
    ran_for = timedelta(0) if job.started_at is None else at - job.started_at
    if limit < max(ran_for, _SHORTEST_TIME):
        left = "nothing would be left of its time limit"
        if limit >= _SHORTEST_TIME:
            left = f"it has run for {format_span(ran_for)}, longer than its limit would be"
        raise BadValue(
            f"cannot extend job {job.id} by {_signed(by)}: {left}",
            f"to end it now: gpulease cancel {job.id}",
        )


def _signed(span: timedelta) -> str:
    return f"-{format_span(-span)}" if span < timedelta(0) else f"+{format_span(span)}"


def note_enclosed(
    store: Store,
    job_id: JobId,
    everywhere: Collection[str],
    enclosed: AppliedEnforcement,
    clock: Clock,
) -> Job:
    """Store what holds the leases of a job that is about to be launched.

    Raises:
        RecordUnwritable: it cannot be stored at this moment.
    """
    with store.write() as tx:
        job = with_enforcement(existing(tx, job_id), everywhere, enclosed)
        tx.save(job, Event(clock.now(), "enclosed", _said(job, enclosed)))
    return job


def note_limits(
    store: Store, job_id: JobId, limits: Mapping[GpuUuid, int | None], said: str, clock: Clock
) -> Job:
    """Store the limits by the driver that a running job has now, and what is said of it.

    Raises:
        RecordUnwritable: it cannot be stored at this moment.
    """
    with store.write() as tx:
        job = with_driver_limits(existing(tx, job_id), limits)
        tx.save(job, Event(clock.now(), "enclosed", said))
    return job


def _said(job: Job, enclosed: AppliedEnforcement) -> str:
    """Return what was put around a job, in words."""
    limits = [format_size(limit) for limit in enclosed.limits.values()]
    held = [f"the driver keeps it to {' and '.join(limits)}"] if limits else []
    held += ["it can open its own GPUs alone"] if enclosed.devices else []
    return "; ".join((*held, *enclosed.missing)) or "nothing holds it from outside"
