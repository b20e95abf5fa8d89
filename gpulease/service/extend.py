"""More time for a job, or less: its limit counts from its start, before and after."""

from datetime import datetime, timedelta

from gpulease.domain.claim import LONGEST_TIME
from gpulease.domain.job import Job, with_time_limit
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.errors import BadValue, WrongState
from gpulease.service.leases import existing
from gpulease.service.ports import Clock, Event, Store
from gpulease.units import format_span

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
