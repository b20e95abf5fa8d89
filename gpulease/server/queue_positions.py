"""The positions of queued jobs, and the first of them in the order of the queue."""

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from gpulease.domain.explain import Explanations
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.plan import Plan
from gpulease.service.scheduler import Scheduler


class Placed(NamedTuple):
    """A queued job, and its position in the queue if it may start."""

    job: Job
    position: int | None


class QueuePositions:
    """The position of each queued job, as of the latest explanations."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._explanations: Explanations | None = None
        self._newer: list[JobId] = []
        """Jobs that the plan does not know, by id: until the next pass they come last."""

    def of(self, job: Job, explanations: Explanations | None) -> int | None:
        """Return the position of a job, 1 for the next; None unless it is queued."""
        if job.state is not State.QUEUED:
            return None
        if explanations is not self._explanations:
            self._explanations, self._newer = explanations, []
        if _is_blocked(job, self._scheduler.plan):
            return None
        positions = explanations.positions if explanations else {}
        newest = explanations.newest if explanations else JobId(0)
        if job.id <= newest:
            return positions.get(job.id)
        newer = self._newer
        if not newer or job.id > newer[-1]:
            newer.extend(each.id for each in self._newer_than(newer[-1] if newer else newest))
        index = bisect_left(newer, job.id)
        found = index < len(newer) and newer[index] == job.id
        return len(positions) + index + 1 if found else None

    def first(self, explanations: Explanations | None, most: int | None) -> Sequence[Placed]:
        """Return the first jobs of the queue; None: all of them.

        Jobs that have left it since the explanations leave no gap.
        """
        store = self._scheduler.store
        positions = explanations.positions if explanations else {}
        known = (job for each in positions if (job := store.live_job(each)) is not None)
        newer = self._newer_than(explanations.newest if explanations else JobId(0))
        eligible = chain(filter(self._is_eligible, known), newer)
        first = [Placed(job, place) for place, job in enumerate(islice(eligible, most), 1)]
        left = None if most is None else most - len(first)
        if left == 0:
            return first
        placed = {each.job.id for each in first}
        queued = (job for job in store.live() if job.state is State.QUEUED)
        others = (Placed(job, None) for job in queued if job.id not in placed)
        return [*first, *islice(others, left)]

    def _newer_than(self, last: JobId) -> list[Job]:
        newer = takewhile(lambda each: each.id > last, reversed(self._scheduler.store.live()))
        return [*filter(self._is_eligible, newer)][::-1]

    def _is_eligible(self, job: Job) -> bool:
        return job.state is State.QUEUED and not _is_blocked(job, self._scheduler.plan)


def without(first: Sequence[Placed], started: Container[JobId]) -> Sequence[Placed]:
    """Return the first jobs of the queue but those that have started since, again with no gap."""
    left = [each for each in first if each.job.id not in started]
    if len(left) == len(first):
        return first
    # Those without a position are the last.
    return [
        Placed(each.job, None if each.position is None else place)
        for place, each in enumerate(left, 1)
    ]


def _is_blocked(job: Job, plan: Plan | None) -> bool:
    if job.queue.held or job.queue.after:
        return True
    # The explanations may be of an earlier plan.
    return plan is not None and (job.id in plan.blocked or plan.limits.exceeded_by(job) is not None)
