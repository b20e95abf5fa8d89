"""Finds leases that are not used while other jobs wait; `keep` exempts a job for a while.

As in `overuse.py`, the caller acts on the findings and calls `settled` after each.
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
from gpulease.service.transactions import change_jobs
from gpulease.units import format_span


@dataclass(frozen=True, slots=True)
class IdleFinding:
    """An idle job that needs an action."""

    job: Job
    policy: IdlePolicy
    action: IdleAction
    idle_for: timedelta
    state: IdleState
    """The state after the action."""


class IdleWatch:
    """Tracks the idleness of each job from one observation to the next."""

    def __init__(self, policy_of: Callable[[Owner], IdlePolicy]) -> None:
        self._policy_of = policy_of
        self._states: dict[JobId, IdleState] = {}

    def state(self, job: JobId) -> IdleState:
        """Return the state of a job since the last observation."""
        return self._states.get(job, IdleState())

    def policy(self, job: Job) -> IdlePolicy:
        """Return the policy for a job.

        A lease without a job is never released while its process holds memory: the process would
        continue, and hold that memory without a lease. One of a job of Slurm is never released:
        Slurm would still count its memory.
        """
        policy = self._policy_of(job.owner)
        holds = any(each.used != 0 for each in self.state(job.id).last)
        stays = job.slurm is not None or (job.holder is not None and holds)
        if stays and policy.release is Release.RELEASE:
            return replace(policy, release=Release.WARN)
        return policy

    def findings(
        self, jobs: Sequence[Job], seen: Observation, wanted: frozenset[GpuUuid], now: timedelta
    ) -> list[IdleFinding]:
        """Return the jobs that need an action after one observation.

        `now` is the time of the observation by the steady clock.
        """
        running = [job for job in jobs if job.state is State.ACTIVE]
        for gone in self._states.keys() - {job.id for job in running}:
            del self._states[gone]
        found = []
        for job in running:
            policy = self.policy(job)
            before = self.state(job.id)
            after, action = judge_idleness(
                tuple(
                    Activity(seen.utilization(job.id, each.gpu), seen.used(job.id, each.gpu))
                    for each in job.leases
                ),
                before,
                policy,
                wanted=any(lease.gpu in wanted for lease in job.leases),
                kept=job.is_kept(seen.at),
                now=now,
            )
            if action is IdleAction.NOTHING:
                self._states[job.id] = after
                continue
            self._states[job.id] = replace(
                after,
                warned_for=after.warned_for if before.warned_for is not None else None,
                released=before.released,
            )
            found.append(IdleFinding(job, policy, action, after.idle_for or timedelta(0), after))
        return found

    def settled(self, found: IdleFinding) -> None:
        """Note that the action for a job has been taken."""
        self._states[found.job.id] = found.state


KEPT_FOR = timedelta(hours=1)
"""The default of `keep`."""
LONGEST_KEPT = timedelta(days=1)
"""The longest span of one `keep`, which can be repeated."""
_WHY_NOT_KEPT = {
    State.QUEUED: "it is queued and holds no memory yet",
    State.RELEASING: "it is being stopped",
    State.ENDED: "it has ended",
}


def keep(store: Store, job_id: JobId, span: timedelta, who: str, clock: Clock) -> Job:
    """Exempt a job from idle checks for `span` from now on.

    Raises:
        NoSuchJob: no job has this id.
        WrongState: it holds no memory.
        BadValue: the span is over a day, or not above zero.
    """
    if not timedelta(0) < span <= LONGEST_KEPT:
        raise BadValue(
            f"cannot keep job {job_id} for {format_span(span)}: the limit is one day at a time",
            f"repeat it every day: gpulease keep {job_id} --for 1d",
        )
    with change_jobs(store) as tx:
        job = existing(tx, job_id)
        if job.state not in (State.GRANTED, State.ACTIVE):
            raise WrongState(
                f"cannot keep job {job.label}: {_WHY_NOT_KEPT[job.state]}",
                f"gpulease show {job.label} shows its state",
            )
        at = clock.now()
        kept = replace(job, kept_until_at=at + span)
        tx.save(kept, Event(at, "keep", f"for {format_span(span)}, by {who}"))
    return kept
