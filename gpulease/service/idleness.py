"""The watch over leases under which nothing happens while others wait: look, decide, remember.

As in `overuse.py`, what is found is settled when what was to be done about it is done.

A lease that is idle on purpose: its owner says for how long nobody is to mind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.idle import (
    Activity,
    IdleAction,
    IdlePolicy,
    IdleState,
    Release,
    judge_idleness,
)
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import State
from gpulease.errors import BadValue, WrongState
from gpulease.service.jobs import existing
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, Event, Store
from gpulease.units import format_span


@dataclass(frozen=True, slots=True)
class IdleFinding:
    """A job about which something is to be done."""

    job: Job
    policy: IdlePolicy
    step: IdleAction
    idle_for: timedelta
    rest: IdleState
    """How it rests when that has been done."""


class IdleWatch:
    """Remembers how each job rests from one look to the next."""

    def __init__(self, policy_of: Callable[[Owner], IdlePolicy]) -> None:
        self._policy_of = policy_of
        self._rests: dict[JobId, IdleState] = {}

    def rest(self, job: JobId) -> IdleState:
        """Return how a job rests since the last look."""
        return self._rests.get(job, IdleState())

    def policy(self, job: Job) -> IdlePolicy:
        """Return what holds for a job. One that holds memory by itself is never released.

        Of a lease without a job nothing would be ended, and what its process holds would go on
        to be held, outside any lease.
        """
        policy = self._policy_of(job.owner)
        holds = any(each.used != 0 for each in self.rest(job.id).last)
        if job.holder is not None and holds and policy.release is Release.RELEASE:
            return replace(policy, release=Release.WARN)
        return policy

    def findings(
        self, jobs: Sequence[Job], seen: Observation, wanted: frozenset[GpuUuid], now: timedelta
    ) -> list[IdleFinding]:
        """Take in one look at the GPUs; return what something is to be done about.

        `now` is when it was, by a clock that nobody can set.
        """
        running = [job for job in jobs if job.state is State.ACTIVE]
        for gone in self._rests.keys() - {job.id for job in running}:
            del self._rests[gone]
        sums = seen.used_by_job()
        found = []
        for job in running:
            policy = self.policy(job)
            before = self.rest(job.id)
            after, step = judge_idleness(
                tuple(
                    Activity(seen.utilization(job.id, each.gpu), seen.used(job.id, each.gpu, sums))
                    for each in job.leases
                ),
                before,
                policy,
                wanted=any(lease.gpu in wanted for lease in job.leases),
                kept=job.kept_until_at is not None and seen.at < job.kept_until_at,
                now=now,
            )
            if step is IdleAction.NOTHING:
                self._rests[job.id] = after
                continue
            self._rests[job.id] = replace(
                after,
                warned_for=after.warned_for if before.warned_for is not None else None,
                released=before.released,
            )
            found.append(IdleFinding(job, policy, step, after.idle_for or timedelta(0), after))
        return found

    def settled(self, found: IdleFinding) -> None:
        """Note that what was to be done about a job has been done."""
        self._rests[found.job.id] = found.rest


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
