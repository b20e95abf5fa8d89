"""The watch over leases under which nothing happens while others wait: look, decide, remember.

As in `overuse.py`, what is found is settled when what was to be done about it is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpulease.domain.idleness import Activity, IdlePolicy, IdleStep, Release, Rest, judge_rest
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import State
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.service.look import Look


@dataclass(frozen=True, slots=True)
class AtRest:
    """A job about which something is to be done."""

    job: Job
    policy: IdlePolicy
    step: IdleStep
    idle_for: timedelta
    rest: Rest
    """How it rests when that has been done."""


class RestWatch:
    """Remembers how each job rests from one look to the next."""

    def __init__(self, policy_of: Callable[[Owner], IdlePolicy]) -> None:
        self._policy_of = policy_of
        self._rests: dict[JobId, Rest] = {}

    def rest(self, job: JobId) -> Rest:
        """Return how a job rests since the last look."""
        return self._rests.get(job, Rest())

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

    def look(
        self, jobs: Sequence[Job], seen: Look, wanted: frozenset[GpuUuid], now: timedelta
    ) -> list[AtRest]:
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
            after, step = judge_rest(
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
            if step is IdleStep.NOTHING:
                self._rests[job.id] = after
                continue
            self._rests[job.id] = replace(
                after,
                told_for=after.told_for if before.told_for is not None else None,
                released=before.released,
            )
            found.append(AtRest(job, policy, step, after.idle_for or timedelta(0), after))
        return found

    def settled(self, found: AtRest) -> None:
        """Note that what was to be done about a job has been done."""
        self._rests[found.job.id] = found.rest
