"""The merit of waiting jobs after moves (`gpulease move`).

A user who moves a job lets others sink behind it, so that no other user waits longer. An admin lets
the job rise to the place of the other one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job

FIRST = JobId(0)
"""Stands for all other jobs: of its owner, or of everyone if an admin moved it."""
_ABOVE_ALL = 1e300
_STEP = 1e-9
"""Relative difference of the merits of jobs that follow each other by a move."""


_Key = JobId | tuple[str, JobId]
"""A job, for its merit; or a user and a job, for the most merit of that job."""


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
        self._movers: dict[tuple[str, JobId], list[JobId]] = {}
        """The jobs that users moved, by user and by the job that they go before."""
        self._values: dict[_Key, float] = {}
        for job in moved:
            if not job.queue.moved_by_admin:
                key = job.owner.user, job.queue.moved_before or FIRST
                self._movers.setdefault(key, []).append(job.id)

    def merit(self, job: Job) -> float:
        """Return the merit of a waiting job after all moves.

        Chains of moves are as long as the queue, so this does not recurse.
        """
        left: list[_Key] = [job.id]
        begun = set[_Key]()
        while left:
            key = left[-1]
            if key in self._values:
                left.pop()
            elif key not in begun:
                begun.add(key)
                left += [each for each in self._depends_on(key) if each not in begun]
            else:
                self._values[key] = self._value(key)
        return self._values[job.id]

    def _depends_on(self, key: _Key) -> Sequence[_Key]:
        """Return the values that one follows from."""
        if isinstance(key, tuple):
            return self._movers[key]
        job = self._jobs[key]
        bounds, target = self._bounds_of(job), job.queue.moved_before
        if job.queue.moved_by_admin and target is not None and target in self._jobs:
            return [*bounds, target]
        return bounds

    def _bounds_of(self, job: Job) -> list[tuple[str, JobId]]:
        """Return the keys of what a job must not exceed: others of its owner go before it."""
        user, options = job.owner.user, job.queue
        is_first = options.moved_before == FIRST and not options.moved_by_admin
        keys = [(user, job.id)] if is_first else [(user, job.id), (user, FIRST)]
        return [key for key in keys if key in self._movers]

    def _value(self, key: _Key) -> float:
        # A later move undoes earlier ones in a circle; if one is left, a part has no effect.
        if isinstance(key, tuple):
            least = min(self._values.get(mover, _ABOVE_ALL) for mover in self._movers[key])
            return least - abs(least) * _STEP
        job = self._jobs[key]
        merit = self._own_merit(job)
        if job.queue.moved_by_admin:
            merit = max(merit, self._place_of(job.queue.moved_before, job.owner.user))
        bounds = (self._values.get(bound, _ABOVE_ALL) for bound in self._bounds_of(job))
        return min(merit, *bounds, _ABOVE_ALL)

    def _place_of(self, target: JobId | None, user: str) -> float:
        """Return the merit with which a job of `user` is just before another one."""
        if target == FIRST:
            return _ABOVE_ALL
        if target is None or target not in self._values:
            return -math.inf  # it does not wait any more
        equal = self._values[target] * self._factor(user)
        equal /= self._factor(self._jobs[target].owner.user)
        return equal + abs(equal) * _STEP
