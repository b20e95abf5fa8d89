"""The positions of queued jobs, and the first rows of the queue in its order."""

from bisect import bisect_left
from collections.abc import Container, Hashable, Iterator, Sequence
from itertools import chain, islice, takewhile
from operator import is_
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


Row = Sequence[Placed]
"""Queued jobs that one line shows: one, or elements of an array that wait for the same."""


class QueuePositions:
    """The position of each queued job, as of the latest explanations."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._explanations: Explanations | None = None
        self._newer: list[JobId] = []
        """Jobs that the plan does not know, by id: until the next pass they come last."""
        self._rows: Sequence[Row] = ()
        self._rows_of: tuple[object, ...] = (self,)
        """What the latest rows were made from."""

    def of(self, job: Job, explanations: Explanations | None, plan: Plan | None) -> int | None:
        """Return the position of a job, 1 for the next; None unless it is queued."""
        if job.state is not State.QUEUED:
            return None
        if explanations is not self._explanations:
            self._explanations, self._newer = explanations, []
        if _is_blocked(job, plan):
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

    def rows(self, explanations: Explanations | None, most: int | None) -> Sequence[Row]:
        """Return the first rows of the queue, at most so many; None: each job.

        If that leaves no job out, each job has a row. If it would, the elements of an array that
        wait for the same share one.
        """
        if most is None:
            return [[each] for each in self._in_order(explanations)]
        # While nothing changes, the elements of a large array are gone through once.
        rows_of = most, explanations, self._scheduler.plan, self._scheduler.store.live()
        if not all(map(is_, rows_of, self._rows_of)):
            self._rows, self._rows_of = self._first_rows(explanations, most), rows_of
        return self._rows

    def _first_rows(self, explanations: Explanations | None, most: int) -> Sequence[Row]:
        in_order = self._in_order(explanations)
        first = [*islice(in_order, most + 1)]
        if len(first) <= most:
            return [[each] for each in first]
        rows: dict[Hashable, list[Placed]] = {}
        arrays = False
        for placed in chain(first, in_order):
            key = self._key(placed)
            if key in rows:
                rows[key].append(placed)
            elif len(rows) < most:
                rows[key] = [placed]
                arrays |= placed.job.queue.array is not None
            elif not arrays:
                break
        return [*rows.values()]

    def _key(self, placed: Placed) -> Hashable:
        """Return what is the same for the jobs that share a row."""
        job, options = placed.job, placed.job.queue
        if options.array is None:
            return job.id
        if placed.position is not None:
            return options.array.job, None
        plan = self._scheduler.plan
        block = None if plan is None else plan.blocked.get(job.id)
        return options.array.job, block or (options.held, options.after)

    def _in_order(self, explanations: Explanations | None) -> Iterator[Placed]:
        """Yield the queue. Jobs that have left it since the explanations leave no gap."""
        store = self._scheduler.store
        positions = explanations.positions if explanations else {}
        known = (job for each in positions if (job := store.live_job(each)) is not None)
        newer = self._newer_than(explanations.newest if explanations else JobId(0))
        eligible = chain(filter(self._is_eligible, known), newer)
        placed = set()
        for place, job in enumerate(eligible, 1):
            placed.add(job.id)
            yield Placed(job, place)
        queued = (job for job in store.live() if job.state is State.QUEUED)
        yield from (Placed(job, None) for job in queued if job.id not in placed)

    def _newer_than(self, last: JobId) -> list[Job]:
        newer = takewhile(lambda each: each.id > last, reversed(self._scheduler.store.live()))
        return [*filter(self._is_eligible, newer)][::-1]

    def _is_eligible(self, job: Job) -> bool:
        return job.state is State.QUEUED and not _is_blocked(job, self._scheduler.plan)


def without(rows: Sequence[Row], started: Container[JobId]) -> Sequence[Row]:
    """Return the first rows without jobs that have started since, again with no gap."""
    gone = [each for row in rows for each in row if each.job.id in started]
    if not gone:
        return rows
    places = sorted(each.position for each in gone if each.position is not None)
    left = [
        [
            Placed(job, None if place is None else place - bisect_left(places, place))
            for job, place in row
            if job.id not in started
        ]
        for row in rows
    ]
    return [row for row in left if row]


def _is_blocked(job: Job, plan: Plan | None) -> bool:
    if job.queue.held or job.queue.after:
        return True
    # The explanations may be of an earlier plan.
    return plan is not None and (job.id in plan.blocked or plan.limits.exceeded_by(job) is not None)
