"""A lease that is idle on purpose: its owner says for how long nobody is to mind."""

from dataclasses import replace
from datetime import timedelta

from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.errors import BadValue, WrongState
from gpulease.service.leases import existing
from gpulease.service.ports import Clock, Event, Store
from gpulease.units import format_span

KEPT_FOR = timedelta(hours=1)
"""If nobody says otherwise."""
LONGEST_KEPT = timedelta(days=1)
"""At once; it can be said again."""
_STANDS = {
    State.QUEUED: "it waits, and holds nothing yet",
    State.RELEASING: "it was asked to end",
    State.ENDED: "it has ended",
}


def keep(store: Store, job_id: JobId, span: timedelta, who: str, clock: Clock) -> Job:
    """Let a job be idle for `span` from now on.

    Raises:
        NoSuchJob: there is none.
        WrongState: it holds nothing that it could keep.
        BadValue: that is too long, or no time at all.
    """
    if not timedelta(0) < span <= LONGEST_KEPT:
        raise BadValue(
            f"cannot keep job {job_id} for {format_span(span)}: at most a day can be asked for",
            f"it can be said again: gpulease keep {job_id} --for 1d",
        )
    with store.write() as tx:
        job = existing(tx, job_id)
        if job.state not in (State.GRANTED, State.ACTIVE):
            raise WrongState(
                f"cannot keep job {job_id}: {_STANDS[job.state]}",
                f"gpulease show {job_id} tells more",
            )
        at = clock.now()
        kept = replace(job, kept_until_at=at + span)
        tx.save(kept, Event(at, "keep", f"for {format_span(span)}, by {who}"))
    return kept
