"""Changes of jobs: cancel, extend, and what happens to a worker. Each is one transaction."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from gpulease.domain.enforcement import AppliedEnforcement, with_driver_limits, with_enforcement
from gpulease.domain.gpu import LARGEST_ID, GpuUuid, JobId
from gpulease.domain.job import (
    QUEUED_AGAIN,
    Exit,
    Job,
    Outcome,
    asked_to_end,
    back_in_queue,
    main_exited,
    not_queued_again,
    with_time_limit,
    worker_gone,
    worker_started,
)
from gpulease.domain.lease import LONGEST_TIME, IllegalTransition, State, Trigger
from gpulease.domain.limits import NO_LIMITS, UserLimits
from gpulease.domain.notifications import NotifyEvent, about
from gpulease.errors import BadValue, GpuleaseError, NoSuchJob, WrongState, split_hint
from gpulease.service.ports import (
    Clock,
    Event,
    MainExited,
    Store,
    Transaction,
    WorkerExited,
    WorkerStarted,
)
from gpulease.service.refusals import refuse_longer
from gpulease.service.requeue import after_end, last_attempt
from gpulease.service.transactions import add_once, change_jobs
from gpulease.units import format_size, format_span

Settle = Callable[[Transaction, Job, Job], Job]
"""Settles the account of a job, from before and after its end, in the transaction of its end."""


_OF_SLURM = "Slurm runs it"


def cancel(store: Store, job_id: JobId, by: str, clock: Clock) -> Job:
    """End a queued job, or mark a running one as stopping; the caller stops its worker.

    Raises:
        NoSuchJob: no job has this id.
        WrongState: it has ended.
    """
    at = clock.now()

    def ended(job: Job) -> Job | None:
        last = last_attempt(store, job)
        if job.state is State.ENDED and last.state is not State.ENDED:
            raise WrongState(
                f"cannot cancel job {job.label}: it has ended, and job {last.id} continues it",
                f"gpulease cancel {last.id}",
            )
        return cancelled(job, by, at)

    return _change(store, job_id, ended, Event(at, Trigger.CANCEL, f"by {by}"))


def _change(store: Store, job_id: JobId, change: Callable[[Job], Job | None], event: Event) -> Job:
    """Store a change of a job, and return it; None from `change`: the job stays as it is."""
    with change_jobs(store) as tx:
        job = existing(tx, job_id)
        changed = change(job)
        if changed is None:
            return job
        tx.save(changed, event)
    return changed


def cancel_all(
    store: Store, chosen: Callable[[Job], bool], by: Callable[[Job], str], clock: Clock
) -> Sequence[Job]:
    """Cancel the chosen jobs that wait or run, in one transaction; the caller stops workers.

    So no waiting job starts in the memory of a running one that is cancelled with it.
    """
    with change_jobs(store) as tx:
        at = clock.now()
        changed: list[Job] = []
        ended_by: dict[str, list[Job]] = {}
        for job in (job for job in tx.live() if chosen(job)):
            who = by(job)
            if job.state is State.QUEUED and (ended := cancelled(job, who, at)) is not None:
                ended_by.setdefault(who, []).append(ended)
                changed.append(ended)
            elif (stopping := cancelled(job, who, at)) is None:
                changed.append(job)
            else:
                tx.save(stopping, Event(at, Trigger.CANCEL, f"by {who}"))
                changed.append(stopping)
        for who, waiting in ended_by.items():
            tx.save_all(waiting, Event(at, Trigger.CANCEL, f"by {who}"))
    return changed


def cancelled(job: Job, by: str, at: datetime) -> Job | None:
    """Return the cancelled job; None if it is being cancelled already.

    A job that is being stopped to be queued again only ends.

    Raises:
        WrongState: it has ended.
    """
    released = job.holder is not None and job.state is State.ACTIVE and by == job.owner.user
    outcome = Outcome.RELEASED if released else Outcome.CANCELLED
    detail = f"{outcome} by {by}"
    try:
        changed = asked_to_end(job, Trigger.CANCEL, outcome, detail, at)
        return changed or not_queued_again(job, outcome, detail)
    except IllegalTransition:
        raise WrongState(
            f"cannot cancel job {job.label}: it has ended",
            f"see gpulease show {job.label}",
        ) from None


def revoke(store: Store, job_id: JobId, why: Outcome, detail: str, clock: Clock) -> Job | None:
    """Mark a running job as stopping, and return it; None if it is stopping already."""
    with change_jobs(store) as tx:
        job = existing(tx, job_id)
        at = clock.now()
        changed = asked_to_end(job, Trigger.REVOKE, why, detail, at)
        if changed is not None:
            tx.save(changed, Event(at, Trigger.REVOKE, split_hint(detail)[0]))
    return changed


def requeue(store: Store, job_id: JobId, by: str, clock: Clock) -> Job:
    """Mark a running job as stopping, to be queued again when it has ended; and return it.

    Raises:
        NoSuchJob: no job has this id.
        WrongState: it is queued, is being stopped, has ended, or is a hold.
    """
    at, detail = clock.now(), f"stopped by {by}"

    def stopped(job: Job) -> Job | None:
        refused = _why_not_requeued(job)
        if refused is not None:
            raise WrongState(f"cannot requeue job {job.label}: {refused[0]}", refused[1])
        return asked_to_end(job, Trigger.REVOKE, Outcome.REQUEUED, detail, at)

    event = Event(at, Trigger.REVOKE, f"{detail} to be queued again")
    return _change(store, job_id, stopped, event)


def _why_not_requeued(job: Job) -> tuple[str, str] | None:
    if job.holder is not None:
        return "it is a hold, which has no command", f"gpulease cancel {job.label} releases it"
    if job.slurm is not None:
        return _OF_SLURM, f"scontrol requeue {job.slurm.id}"
    show = f"gpulease show {job.label} shows its state"
    match job.state:
        case State.QUEUED:
            return (
                "it waits already",
                f"gpulease edit {job.label} changes it; gpulease move changes its place",
            )
        case State.RELEASING if job.outcome not in QUEUED_AGAIN:
            return "it is being stopped", show
        case State.ENDED:
            return (
                "it has ended, and its environment is kept only until then",
                f"submit it again; gpulease show {job.label} shows its command",
            )
        case _:
            return None


def withdraw(store: Store, job_id: JobId, why: str, clock: Clock) -> Job:
    """Remove a job from the queue whose client has gone; a granted one stays."""
    at = clock.now()

    def ended(job: Job) -> Job | None:
        if job.state is not State.QUEUED:
            return None
        return asked_to_end(job, Trigger.CANCEL, Outcome.CANCELLED, why, at)

    return _change(store, job_id, ended, Event(at, Trigger.CANCEL, why))


def note_started(store: Store, job_id: JobId, news: WorkerStarted) -> Job:
    """Store that the worker of a job runs; a repetition changes nothing."""
    return _change(store, job_id, lambda job: _started(job, news), _start_of(news))


def _started(job: Job, news: WorkerStarted) -> Job | None:
    """Return a job whose worker runs; None if that is known."""
    changed = worker_started(job, news.pid, news.shim_pid, news.at)
    if changed is not None and any(lease.enforced_by is None for lease in job.leases):
        return with_enforcement(changed, news.levels)
    return changed


def _start_of(news: WorkerStarted) -> Event:
    held_by = None if news.pid is None else f"pid {news.pid}"
    return Event(news.at, Trigger.WORKER_STARTED, held_by)


def note_expired(store: Store, job_id: JobId, clock: Clock) -> Job:
    """Store that the worker is being stopped at its time limit."""
    at, why = clock.now(), "its time limit is over"
    return _change(
        store,
        job_id,
        lambda job: asked_to_end(job, Trigger.EXPIRE, Outcome.TIME_LIMIT, why, at),
        Event(at, Trigger.EXPIRE, why),
    )


def note_main_exited(store: Store, job_id: JobId, news: MainExited) -> Job:
    """Store that the main process has ended while others of the job run."""
    how = f"{news.exit}; other processes of the job are still running"
    event = Event(news.at, "main_exited", how)
    return _change(store, job_id, lambda job: main_exited(job, news.exit, news.at), event)


def note_exited(
    store: Store, job_id: JobId, news: WorkerExited, settle: Settle | None = None
) -> Job:
    """Store how a job ended; its memory is free from here on.

    `settle` may change the ended job, and add to the transaction.
    """
    with change_jobs(store) as tx:
        job = existing(tx, job_id)
        if news.started is not None and job.holds_memory:
            started = _started(job, news.started)
            if started is not None:
                tx.note(job_id, _start_of(news.started))
                job = started
        outcome, detail = news.outcome, news.detail
        # It was cancelled after its shim was told to stop it for the queue.
        cancelled_since = job.outcome is Outcome.CANCELLED and outcome in QUEUED_AGAIN
        stopped = outcome in (job.outcome, Outcome.LOST) or cancelled_since
        if job.outcome is not None and (stopped or not job.has_shim):
            # The request to stop is the reason, even if the end was not seen. A lease without a
            # shim has no other reason.
            outcome, detail = job.outcome, job.detail
        changed = worker_gone(job, Trigger.WORKER_EXITED, outcome, detail, news.exit, news.at)
        if changed is None:
            return job
        changed = replace(changed, host_use=news.host_use)
        if settle is not None:
            changed = settle(tx, job, changed)
        changed = after_end(tx, job, changed, news)
        how = news.outcome if job.has_shim else outcome
        tx.save(changed, Event(news.at, Trigger.WORKER_EXITED, how))
    return changed


def note_launch_failed(store: Store, job_id: JobId, why: GpuleaseError, clock: Clock) -> Job:
    """Store that the job was not launched, and why."""
    with change_jobs(store) as tx:
        job = existing(tx, job_id)
        at = clock.now()
        if job.outcome is None:
            how = Outcome.LAUNCH_FAILED, why.text(), Exit(why.exit_code)
        else:
            # It was cancelled before its start.
            how = job.outcome, job.detail or why.text(), Exit()
        changed = worker_gone(job, Trigger.LAUNCH_FAILED, *how, at)
        if changed is None:
            return job
        changed = after_end(tx, job, changed)
        tx.save(changed, Event(at, Trigger.LAUNCH_FAILED, why.message))
    return changed


def take_back_grants(store: Store, was_launched: Callable[[Job], bool], clock: Clock) -> int:
    """Queue the jobs again that were granted before a reboot and never launched; return how many.

    Only after a reboot: before, a shim of an earlier daemon may still launch one.
    """
    never = [
        job
        for job in store.live()
        if job.state is State.GRANTED and job.has_shim and not was_launched(job)
    ]
    if never:
        with change_jobs(store) as tx:
            for job in never:
                why = "the machine was restarted before the job started"
                tx.save(back_in_queue(job), Event(clock.now(), Trigger.LAUNCH_DEFERRED, why))
    return len(never)


def note_notice(
    store: Store, job_id: JobId, text: str, clock: Clock, event: NotifyEvent | None = None
) -> None:
    """Store a notice to the owner of a job, which may have ended.

    If the job asks for notifications of `event`, the first one is sent, too.
    """
    with change_jobs(store) as tx:
        job, at = existing(tx, job_id), clock.now()
        tx.note(job_id, Event(at, "notice", text))
        if event is not None and event in job.notify:
            add_once(tx, job, about(job, event, text), at)


def existing(records: Transaction | Store, job_id: JobId) -> Job:
    """Return a job.

    Raises:
        NoSuchJob: no job has this id.
    """
    job = records.job(job_id) if 0 < job_id <= LARGEST_ID else None
    if job is None:
        raise NoSuchJob(f"no job {job_id}", "gpulease list --all shows all jobs")
    return job


_SHORTEST_TIME = timedelta(seconds=1)


def extend(
    store: Store,
    job_id: JobId,
    by: timedelta,
    who: str,
    clock: Clock,
    limits: UserLimits = NO_LIMITS,
) -> Job:
    """Add `by`, which may be negative, to the time limit of a job; the caller informs its worker.

    The limit counts from the start of the job. `limits` are those of its owner, unless an admin
    extends it.

    Raises:
        NoSuchJob: no job has this id.
        WrongState: it has ended, is stopping, or has no limit.
        BadValue: the new limit has passed already, or is too long.
    """
    with change_jobs(store) as tx:
        job = existing(tx, job_id)
        at = clock.now()
        limit = _new_limit(job, by)
        _refuse_passed_limit(job, by, limit, at)
        if by > timedelta(0):
            refuse_longer(
                limit,
                limits,
                f"extend job {job.label} by {_signed(by)}",
                hold=job.holder is not None,
            )
        changed = with_time_limit(job, limit)
        tx.save(changed, Event(at, "extend", f"by {_signed(by)} to {format_span(limit)}, by {who}"))
    return changed


def _new_limit(job: Job, by: timedelta) -> timedelta:
    hint = f"gpulease show {job.label} shows its state"
    if job.state is State.ENDED:
        raise WrongState(f"cannot extend job {job.label}: it has ended", hint)
    if job.state is State.RELEASING:
        raise WrongState(f"cannot extend job {job.label}: it is being stopped", hint)
    if job.slurm is not None:
        raise WrongState(
            f"cannot extend job {job.label}: {_OF_SLURM}",
            f"an admin of Slurm can: scontrol update jobid={job.slurm.id} timelimit=+60",
        )
    if job.claim.time_limit is None:
        raise WrongState(
            f"cannot extend job {job.label}: it has no time limit",
            f"it may run without end; gpulease cancel {job.label} ends it",
        )
    return job.claim.time_limit + by


def _refuse_passed_limit(job: Job, by: timedelta, limit: timedelta, at: datetime) -> None:
    if limit > LONGEST_TIME:
        raise BadValue(
            f"cannot extend job {job.label} by {_signed(by)}: the limit would be over "
            f"{LONGEST_TIME.days} days",
            "extend it by less; you can extend it again later",
        )
    ran_for = timedelta(0) if job.started_at is None else at - job.started_at
    if limit < max(ran_for, _SHORTEST_TIME):
        why = "no time would be left"
        if limit >= _SHORTEST_TIME:
            why = f"it has run for {format_span(ran_for)}, longer than the new limit"
        raise BadValue(
            f"cannot extend job {job.label} by {_signed(by)}: {why}",
            f"to end it now, use gpulease cancel {job.label}",
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
    """Store the enforcement levels of a job just before its launch.

    Raises:
        RecordUnwritable: they cannot be stored now.
    """
    with change_jobs(store) as tx:
        job = with_enforcement(existing(tx, job_id), everywhere, enclosed)
        tx.save(job, Event(clock.now(), "enclosed", _said(job, enclosed)))
    return job


def note_limits(
    store: Store, job_id: JobId, limits: Mapping[GpuUuid, int | None], said: str, clock: Clock
) -> Job:
    """Store the present driver limits of a running job, and `said` in its history.

    Raises:
        RecordUnwritable: they cannot be stored now.
    """
    with change_jobs(store) as tx:
        job = with_driver_limits(existing(tx, job_id), limits)
        tx.save(job, Event(clock.now(), "enclosed", said))
    return job


def _said(job: Job, enclosed: AppliedEnforcement) -> str:
    """Describe the enforcement around a job."""
    limits = [format_size(limit) for limit in enclosed.limits.values()]
    held = [f"the driver limits it to {' and '.join(limits)}"] if limits else []
    held += ["it can open only its own GPUs"] if enclosed.devices else []
    return "; ".join((*held, *enclosed.missing)) or "nothing outside the job enforces its lease"
