"""Queues jobs again: after a failure, to make way for others, or on request.

A job is launched once, so what continues it is a new job. It is added in the transaction that
stores the end of the old one: after a crash of the daemon either both are stored, or neither.
"""

from dataclasses import replace

from gpulease.domain.gpu import JobId
from gpulease.domain.job import QUEUED_AGAIN, Job, Outcome
from gpulease.domain.retries import delay_of_retry, is_refusal, is_tried_again
from gpulease.errors import NoSuchJob, split_hint, with_hint
from gpulease.service.ports import Event, Store, Submission, Transaction, WorkerExited
from gpulease.units import format_span

_LOST = "its command was lost"
"""With a damaged database, which was recovered without it."""
MOST_FAILURES = 3
"""Failures of the machine in a row after which a job is not queued again: it may cause them."""


def last_attempt(records: Transaction | Store, job: Job) -> Job:
    """Return the last job that continues this one, or this one."""
    while (again := job.usage.retried_as) and (after := records.job(again)) is not None:
        job = after
    return job


def after_end(tx: Transaction, before: Job, ended: Job, news: WorkerExited | None = None) -> Job:
    """Return a job that has ended; queue it again if it made way, or failed and asked for that.

    A job that had done its work is not queued again: only its leftover processes were lost.
    `news` is how its worker ended; None: it had none.
    """
    if ended.outcome in QUEUED_AGAIN:
        return requeued(tx, ended, str(ended.detail))
    is_done = before.exit is not None and before.exit.code == 0
    if ended.usage.retried_as is not None or is_done or news is None:
        return ended
    by_shutdown = news.by_shutdown and before.outcome is None
    if ended.outcome is Outcome.LOST or by_shutdown:
        why = "the machine was shut down" if by_shutdown else str(ended.detail)
        return after_failure(tx, ended, why) if ended.queue.requeue else ended
    # One that was to be queued again may fail by itself just before it is stopped.
    was_ended = before.outcome is not None and before.outcome not in QUEUED_AGAIN
    if was_ended or news.interrupted:
        return ended
    return _after_own_failure(tx, ended)


def after_failure(tx: Transaction, job: Job, why: str) -> Job:
    """Queue a job again under which the machine failed, unless that has happened too often."""
    if _failures_before(tx, job) >= MOST_FAILURES:
        text = f"{why}; not requeued: the machine failed {MOST_FAILURES + 1} times in a row"
        return replace(job, detail=with_hint(text, "submit it again if it is not the cause"))
    return requeued(tx, job, why)


def requeued(tx: Transaction, job: Job, why: str) -> Job:
    """Queue a job again, and return the old one; `why` it ended.

    No quota applies: it waited before, and its place in the queue is all that it has.
    """
    try:
        submission = continuation(tx, job)
    except NoSuchJob:
        return replace(job, detail=f"{why}; not requeued: {_LOST}")
    options = replace(job.queue, requeued=job.queue.requeued + 1)
    job, new = queue_again(tx, job, replace(submission, queue=options))
    tx.note(new.id, Event(new.submitted_at, "requeued", f"continues job {job.label}: {why}"))
    return replace(job, detail=f"{why}; requeued as job {new.id}")


def _after_own_failure(tx: Transaction, job: Job) -> Job:
    """Try a job again that has failed by itself, if it asked for that, and return the old one.

    No quota applies: the new job takes the place of one that has ended.
    """
    by_size = job.usage.out_of_memory and job.usage.retry_factor is not None
    if by_size or job.usage.retried_as is not None or not is_tried_again(job):
        return job  # --retry-oom alone decides about failures of the size
    assert job.exit is not None and job.ended_at is not None, "it has ended by itself"
    why, hint = split_hint(job.detail or job.exit.verb)
    try:
        submission = continuation(tx, job)
    except NoSuchJob:
        return replace(job, detail=f"{why}; not tried again: {_LOST}")
    if is_refusal(job, submission.invocation.options):
        return job
    delay = delay_of_retry(job.queue)
    options = replace(
        job.queue,
        retried=job.queue.retried + 1,
        begin_at=job.ended_at + delay,
        aging_since_at=None,  # it had its turn
    )
    job, new = queue_again(tx, job, replace(submission, queue=options))
    which = f"try {options.retried + 1} of {options.retries + 1}"
    which += f" in {format_span(delay)}" if delay else ""
    tx.note(new.id, Event(new.submitted_at, "retried", f"continues job {job.label}: {why}"))
    return replace(job, detail=with_hint(f"{why}; job {new.id} is {which}", hint))


def continuation(tx: Transaction, job: Job) -> Submission:
    """Return the submission of the same work.

    Raises:
        NoSuchJob: the command is not known any more.
    """
    return Submission(
        owner=job.owner,
        name=job.name,
        command=job.command,
        claim=job.claim,
        invocation=tx.invocation(job.id),
        usage=replace(job.usage, retry_of=job.id, retried_as=None, out_of_memory=False),
        queue=job.queue,
        notify=job.notify,
    )


def queue_again(tx: Transaction, job: Job, submission: Submission) -> tuple[Job, Job]:
    """Add the job that continues `job`, and return both."""
    new = tx.add(submission, job.ended_at or job.submitted_at)
    return replace(job, usage=replace(job.usage, retried_as=new.id)), new


def _failures_before(tx: Transaction, job: Job) -> int:
    """Return how many jobs in a row the machine failed under, just before this one.

    Tries that failed by themselves, or for the size of the lease, do not count.
    """
    count, after = 0, job
    before = _continued(tx, after.usage.retry_of)
    while before is not None and before.outcome not in QUEUED_AGAIN and count < MOST_FAILURES:
        by_itself = after.queue.retried > before.queue.retried
        by_size = after.usage.attempt > before.usage.attempt
        count += not (by_size or by_itself)
        after = before
        before = _continued(tx, after.usage.retry_of)
    return count


def _continued(tx: Transaction, job: JobId | None) -> Job | None:
    return None if job is None else tx.job(job)
