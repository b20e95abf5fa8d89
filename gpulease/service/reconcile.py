"""One pass over the queue: plan on the readings, and commit the decision."""

from gpulease.domain.job import Job, Outcome, asked_to_go, grant
from gpulease.domain.lease import Trigger
from gpulease.domain.memory import JobId
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, plan
from gpulease.service.look import Look, Policy, snapshot
from gpulease.service.ports import Clock, Event, Store, Transaction


def reconcile(
    store: Store,
    seen: Look,
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
        tx.know(seen.readings, at)
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
    return ", ".join(uuid for uuid, _ in placement.shares)
