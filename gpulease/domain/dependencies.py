"""Dependencies between jobs: when one is met, when it never can be, and cycles of them."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome
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
    job: JobId, after: Sequence[Dependency], jobs: Mapping[JobId, Job]
) -> tuple[JobId, ...] | None:
    """Return the jobs of a cycle that `job` would close if it waited for `after`; None for none.

    The first and the last are `job`. `jobs` are those that wait or hold memory.
    """
    elements = elements_by_array(jobs.values())
    came_from: dict[JobId, JobId] = {}
    found = [(job, target) for target in _targets(after, elements)]
    while found:
        waiting, target = found.pop()
        if target == job:
            return _path(job, waiting, came_from)
        if target in came_from or target not in jobs:
            continue
        came_from[target] = waiting
        found += [(target, each) for each in _targets(jobs[target].queue.after, elements)]
    return None


def _targets(
    after: Iterable[Dependency], elements: Mapping[JobId, Sequence[JobId]]
) -> Iterable[JobId]:
    for each in after:
        if each.whole_array:
            yield from elements.get(each.job, ())
        else:
            yield each.job


def _path(job: JobId, last: JobId, came_from: Mapping[JobId, JobId]) -> tuple[JobId, ...]:
    path = [job, last] if last != job else [job]
    while path[-1] in came_from:
        path.append(came_from[path[-1]])
    if path[-1] != job:
        path.append(job)
    return tuple(reversed(path)) if len(path) > 1 else (job, job)
