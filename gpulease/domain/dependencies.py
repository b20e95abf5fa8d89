"""Dependencies between jobs: when one is met, when it never can be, and cycles of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto

from gpulease.domain.gpu import JobId
from gpulease.domain.job import NOT_FAILED, Job, Outcome
from gpulease.domain.queue_options import Condition, Dependency


class Verdict(Enum):
    """What has become of a dependency."""

    WAITS = auto()
    MET = auto()
    FAILED = auto()
    """It can no longer be met."""


def succeeded(job: Job) -> bool:
    """Return whether an ended job counts as successful; a hold does when it is released."""
    if job.outcome is Outcome.EXITED:
        return job.exit is not None and job.exit.code == 0
    return job.outcome is Outcome.RELEASED


def has_failed(job: Job) -> bool:
    """Return whether an ended job failed: it ended without success, and nobody asked for that.

    Filters, counters and notifications mean this by "failed". A dependency asks for success alone.
    """
    return not succeeded(job) and job.outcome not in NOT_FAILED


def verdict(condition: Condition, *, has_failed: bool, is_live: bool) -> Verdict:
    """Return what has become of a dependency on a job or on an array.

    Args:
        condition: how they have to end.
        has_failed: whether the job, or an element of the array, has ended without success.
        is_live: whether the job, or an element of the array, has not ended.
    """
    if condition is Condition.OK and has_failed:
        return Verdict.FAILED
    if is_live:
        return Verdict.WAITS
    if condition is Condition.FAIL and not has_failed:
        return Verdict.FAILED
    return Verdict.MET


def elements_by_array(jobs: Iterable[Job]) -> dict[JobId, list[JobId]]:
    """Return the ids of the elements among `jobs` of each array."""
    found: dict[JobId, list[JobId]] = {}
    for job in jobs:
        if job.queue.array is not None:
            found.setdefault(job.queue.array.job, []).append(job.id)
    return found


def cycle(
    edited: Collection[JobId], after: Sequence[Dependency], jobs: Mapping[JobId, Job]
) -> tuple[JobId, ...] | None:
    """Return the jobs of a cycle that exists if all `edited` jobs wait for `after`; None for none.

    The first and the last are the same edited job. `jobs` are those that wait or hold memory.
    """
    elements = elements_by_array(jobs.values())
    came_from: dict[JobId, JobId | None] = {}
    seen: set[Dependency] = set()
    found: list[tuple[JobId | None, Dependency]] = [(None, each) for each in after]
    while found:
        waiting, dependency = found.pop()
        if dependency in seen:
            continue
        # Thousands of elements may all wait for the same thousands of others.
        seen.add(dependency)
        for target in _targets(dependency, elements):
            if target in edited:
                return _path(target, waiting, came_from)
            if target not in came_from and target in jobs:
                came_from[target] = waiting
                found += [(target, each) for each in jobs[target].queue.after]
    return None


def _targets(dependency: Dependency, elements: Mapping[JobId, Sequence[JobId]]) -> Sequence[JobId]:
    return elements.get(dependency.job, ()) if dependency.whole_array else (dependency.job,)


def _path(
    edited: JobId, last: JobId | None, came_from: Mapping[JobId, JobId | None]
) -> tuple[JobId, ...]:
    path = [edited]
    while last is not None:
        path.append(last)
        last = came_from[last]
    return (edited, *reversed(path))
