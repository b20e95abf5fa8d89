"""The merit of waiting jobs after moves (`gpulease move`).

A user who moves a job lets others sink behind it, so that no other user waits longer. An admin lets
the job rise to the place of the other one.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job

FIRST = JobId(0)
"""Stands for all other jobs: of its owner, or of everyone if an admin moved it."""
_ABOVE_ALL = 1e300
_STEP = 1e-9
"""Relative difference of the merits of jobs that follow each other by a move."""


class Moves:
    """The moves of waiting jobs, as one pass sees them."""

    def __init__(
        self,
        moved: Iterable[Job],
        jobs: Mapping[JobId, Job],
        own_merit: Callable[[Job], float],
        factor: Callable[[str], float],
    ) -> None:
        """Take what makes the score of a job: its own merit, divided by the factor of its user."""
        self._jobs = jobs
        self._own_merit = own_merit
        self._factor = factor
        self._movers: dict[tuple[str, JobId], list[Job]] = {}
        """The jobs that users moved, by user and by the job that they go before."""
        self._bounds: dict[tuple[str, JobId], float] = {}
        for job in moved:
            if not job.queue.moved_by_admin:
                key = job.owner.user, job.queue.moved_before or FIRST
                self._movers.setdefault(key, []).append(job)

    def merit(self, job: Job) -> float:
        """Return the merit of a job after all moves."""
        user, options = job.owner.user, job.queue
        if options.moved_by_admin:
            risen = max(self._own_merit(job), self._place_of(options.moved_before, user))
            return min(risen, self._bound(user, job.id), self._bound(user, FIRST))
        bound = self._bound(user, job.id)
        if options.moved_before != FIRST:
            bound = min(bound, self._bound(user, FIRST))
        return min(self._own_merit(job), bound)

    def _place_of(self, target: JobId | None, user: str) -> float:
        """Return the merit with which a job of `user` is just before another one."""
        if target == FIRST:
            return _ABOVE_ALL
        other = None if target is None else self._jobs.get(target)
        if other is None:
            return -math.inf  # it does not wait any more
        equal = self.merit(other) * self._factor(user) / self._factor(other.owner.user)
        return equal + abs(equal) * _STEP

    def _bound(self, user: str, target: JobId) -> float:
        """Return the most merit of a job of `user` that others were moved before."""
        key = user, target
        if key not in self._movers:
            return math.inf
        if key not in self._bounds:
            # A later move undoes earlier ones in a circle; if one is left, it has no effect.
            self._bounds[key] = math.inf
            least = min(self.merit(mover) for mover in self._movers[key])
            self._bounds[key] = least - abs(least) * _STEP
        return self._bounds[key]
