"""The verbs on a job: submit, cancel, and what happens to its worker. A transaction each."""

from collections.abc import Callable
from datetime import datetime, timedelta

from gpulease.domain.claim import Claim
from gpulease.domain.enforcement import stands_on
from gpulease.domain.job import (
    Exit,
    Job,
    Outcome,
    asked_to_go,
    back_in_queue,
    main_exited,
    worker_gone,
    worker_started,
)
from gpulease.domain.lease import IllegalTransition, State, Trigger
from gpulease.domain.memory import GpuMemory, JobId
from gpulease.domain.placement import can_ever_hold, spans
from gpulease.domain.plan import ledgers, plan, waiting_in
from gpulease.errors import BadValue, CannotLease, GpuleaseError, NoRoomNow, NoSuchJob, WrongState
from gpulease.service.bounds import refuse_one_more, refuse_too_much
from gpulease.service.look import Look, Policy, snapshot
from gpulease.service.ports import (
    Clock,
    Event,
    MainExited,
    Order,
    Store,
    Transaction,
    WorkerExited,
    WorkerStarted,
)
from gpulease.service.sizes import sized
from gpulease.units import MIB, Share, format_size

Settle = Callable[[Transaction, Job, Job], Job]
"""Settles the account of a job, as it was and as it ended, within the transaction of its end."""


def submit(store: Store, order: Order, seen: Look, policy: Policy, clock: Clock) -> Job:
    """Queue a job; when this returns, it is on disk. Of one that was ordered before, return it.

    Raises:
        CannotLease: the claim can never be granted on this machine.
        NoRoomNow: it would have to wait, and does not want to.
        TooMany: the user has as much in the queue as one user may.
    """
    with store.write() as tx:
        before = tx.ordered(order.owner.uid, order.key) if order.key is not None else None
        if before is not None:
            _refuse_another_kind(order, before)
            return before
        at = clock.now()
        refuse_one_more(policy.bounds, order, tx.tally(order.owner.uid))
        empty = ledgers(snapshot((), seen, policy, {}, at))
        order = sized(order, tx, empty, policy)
        refuse_what_can_never_run(order.claim, empty, policy)
        job = tx.add(order, at)
        refuse_too_much(policy.bounds, order, tx.tally(order.owner.uid))
        if order.wait_for == timedelta(0):
            _refuse_to_wait(job, tx, seen, policy)
    return job


def _refuse_another_kind(order: Order, before: Job) -> None:
    """Check that a key is not used for a lease without a job and for a job.

    Raises:
        BadValue: it is.
    """
    if (order.holder is None) != (before.holder is None):
        raise BadValue(
            f"cannot use this key: job {before.id} was submitted under it, and is of another kind",
            "make up a new key for each submission",
        )


def refuse_what_can_never_run(claim: Claim, gpus: tuple[GpuMemory, ...], policy: Policy) -> None:
    """Check that the claim could be granted if nothing else ran.

    Raises:
        CannotLease: it could not.
    """
    if claim.gpus > len(gpus):
        raise CannotLease(
            f"cannot lease {claim.gpus} GPUs: this machine has {len(gpus)}",
            f"ask for at most {len(gpus)}; gpulease status shows them",
        )
    if not isinstance(claim.memory, Share) and claim.memory < policy.smallest_lease:
        smallest = format_size(policy.smallest_lease)
        raise CannotLease(
            f"cannot lease {format_size(claim.memory)}: that holds no CUDA context",
            f"ask for at least {smallest}",
        )
    whole = [gpu for gpu in gpus if gpu.reading.parent is None and not gpu.reading.divided]
    if claim.gpus > max(1, len(whole)):
        raise CannotLease(
            f"cannot lease {claim.gpus} GPUs: this machine has {len(whole)} that MIG does not "
            "divide, and CUDA shows a program one MIG device alone",
            "ask for one GPU, which may be a MIG device"
            + (f", or for at most {len(whole)}" if whole else ""),
        )
    if sum(can_ever_hold(claim, gpu) for gpu in gpus) < claim.gpus:
        raise _never(claim, gpus)


def _never(claim: Claim, gpus: tuple[GpuMemory, ...]) -> CannotLease:
    able = [gpu for gpu in gpus if spans(claim, gpu)]
    sizes = sorted((gpu.allocatable or 0 for gpu in able), reverse=True)
    wanted = str(claim.memory) if isinstance(claim.memory, Share) else format_size(claim.memory)
    if not isinstance(claim.memory, Share) and claim.memory not in sizes:
        shown = {format_size(size) for size in sizes}
        # As much as is offered, to look at: a lease is refused for the digits that are left out.
        wanted = f"{-(-claim.memory // MIB)}M" if wanted in shown else wanted
    if claim.gpus > 1 and not isinstance(claim.memory, Share) and claim.memory <= sizes[0]:
        enough = sum(size >= claim.memory for size in sizes)
        return CannotLease(
            f"cannot lease {wanted} on each of {claim.gpus} GPUs: only {enough} here offer as much",
            f"ask for at most {format_size(sizes[claim.gpus - 1])} on each, or for fewer GPUs",
        )
    if sizes[0] == 0:
        return CannotLease(
            f"cannot lease {wanted}: no GPU here has memory to lease",
            "gpulease status shows the state of each GPU, gpulease doctor what to do about it",
        )
    return CannotLease(
        f"cannot lease {wanted}: the largest GPU here offers {format_size(sizes[0])}",
        f"ask for at most {format_size(sizes[0])} on each GPU"
        + (", or for several GPUs with --gpus" if len(sizes) > 1 and claim.gpus == 1 else ""),
    )


def _refuse_to_wait(job: Job, tx: Transaction, seen: Look, policy: Policy) -> None:
    decided = plan(snapshot(tx.live(), seen, policy, tx.drained(), job.submitted_at))
    if any(granted == job.id for granted, _ in decided.grants):
        return
    reasons = waiting_in(decided, job).refusal.hindrances
    where = "; ".join(f"GPU {each.label}: {each.why}" for each in reasons)
    raise NoRoomNow(
        f"cannot lease {job.claim} now" + (f": {where}" if where else ""),
        "leave out --no-wait to wait in the queue, or give up after a while with --wait 30m",
    )


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
            changed = stands_on(changed, news.rungs)
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
