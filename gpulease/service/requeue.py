"""Queues jobs again: after the machine failed, to make way for others, or on request.

A job is launched once, so what continues it is a new job. It is added in the transaction that
stores the end of the old one: after a crash of the daemon either both are stored, or neither.
"""

from dataclasses import replace

from gpulease.domain.gpu import JobId
from gpulease.domain.job import QUEUED_AGAIN, Job, Outcome
from gpulease.errors import NoSuchJob, with_hint
from gpulease.service.ports import Event, Submission, Transaction

MOST_FAILURES = 3
"""Failures of the machine in a row after which a job is not queued again: it may cause them."""


def after_end(tx: Transaction, before: Job, ended: Job, *, by_shutdown: bool = False) -> Job:
    """Return a job that has ended; queue it again if it made way, or the machine failed under it.

    A job that had done its work is not queued again: only its leftover processes were lost.
    """
    if ended.outcome in QUEUED_AGAIN:
        return requeued(tx, ended, str(ended.detail))
    is_done = before.exit is not None and before.exit.code == 0
    if not ended.queue.requeue or ended.usage.retried_as is not None or is_done:
        return ended
    if ended.outcome is Outcome.LOST:
        return after_failure(tx, ended, str(ended.detail))
    if by_shutdown and before.outcome is None:
        return after_failure(tx, ended, "the machine was shut down")
    return ended


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
        # The database was damaged, and recovered without it.
        return replace(job, detail=f"{why}; not requeued: its command was lost")
    options = replace(job.queue, requeued=job.queue.requeued + 1)
    job, new = queue_again(tx, job, replace(submission, queue=options))
    tx.note(new.id, Event(new.submitted_at, "requeued", f"continues job {job.label}: {why}"))
    return replace(job, detail=f"{why}; requeued as job {new.id}")


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
    """Return how many jobs in a row the machine failed under, just before this one."""
    count = 0
    before = _continued(tx, job.usage.retry_of)
    while before is not None and before.outcome not in QUEUED_AGAIN and count < MOST_FAILURES:
        count += not before.usage.out_of_memory
        before = _continued(tx, before.usage.retry_of)
    return count


def _continued(tx: Transaction, job: JobId | None) -> Job | None:
    return None if job is None else tx.job(job)
