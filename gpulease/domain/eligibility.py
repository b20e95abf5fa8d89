"""Why a queued job may not start now, apart from memory: held, begin time, dependencies, array.

The plan considers only the other jobs. A blocked job delays nobody, has no position, and does not
age. Here too: when a dependency is met, when it never can be, and cycles of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum, auto

from gpulease.domain.gpu import JobId
from gpulease.domain.job import NOT_FAILED, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.queue_options import ArrayElement, Condition, Dependency


class BlockKind(StrEnum):
    """What blocks a queued job."""

    HELD = "held"
    BEGIN = "begin"
    AFTER = "after"
    ARRAY = "array"


@dataclass(frozen=True, slots=True)
class Block:
    """What a queued job waits for before it may start."""

    kind: BlockKind
    begin_at: datetime | None = None
    of_try: int | None = None
    """The number of the try that begins then; None for a job that has not failed."""
    after: tuple[Dependency, ...] = ()
    most_running: int | None = None

    def sentence(self, labels: Mapping[JobId, str]) -> str:
        """Return it as text; `labels` are the names of jobs that people know."""
        match self.kind:
            case BlockKind.HELD:
                return "held until gpulease edit --no-held"
            case BlockKind.BEGIN:
                if self.of_try is not None:
                    return f"it has failed, and waits before try {self.of_try}"
                return "not before its begin time"
            case BlockKind.AFTER:
                return f"not before {_listed(self.after, labels)}"
            case BlockKind.ARRAY:
                return f"its array runs at most {self.most_running} elements at once"


_HELD = Block(BlockKind.HELD)
_ENDINGS = {
    Condition.OK: "succeeds",
    Condition.FAIL: "fails",
    Condition.ANY: "ends",
}
_MOST_NAMED = 3


def _listed(after: tuple[Dependency, ...], labels: Mapping[JobId, str]) -> str:
    named = [
        f"{'array' if each.whole_array else 'job'} "
        f"{each.job if each.whole_array else labels.get(each.job, each.job)} "
        f"{_ENDINGS[each.condition]}"
        for each in after[:_MOST_NAMED]
    ]
    more = len(after) - len(named)
    return " and ".join([*named, f"{more} more"] if more else named)


def blocks(jobs: Iterable[Job], at: datetime) -> dict[JobId, Block]:
    """Return what blocks each queued job that may not start now.

    Of an array with a limit, as many elements may start as the limit leaves, those with the lowest
    ids first, so all of them may start in one pass.

    Args:
        jobs: every job that waits or holds memory, by id.
        at: the time of the pass.
    """
    found: dict[JobId, Block] = {}
    limited: list[tuple[JobId, ArrayElement]] = []
    running: dict[JobId, int] = {}
    last = _HELD
    for job in jobs:
        options, array = job.queue, job.queue.array
        if job.state is not State.QUEUED:
            if array is not None:
                running[array.job] = running.get(array.job, 0) + 1
        elif options.after and options.after == last.after and not options.held:
            # Elements of an array wait for the same.
            found[job.id] = last
        elif (block := own_block(job, at)) is not None:
            found[job.id] = last = block
        elif array is not None and array.most_running is not None:
            limited.append((job.id, array))
    found.update(_over_limit(limited, running))
    return found


def _over_limit(
    limited: Iterable[tuple[JobId, ArrayElement]], running: dict[JobId, int]
) -> Iterator[tuple[JobId, Block]]:
    full: dict[JobId, Block] = {}
    for job_id, array in limited:
        if (block := full.get(array.job)) is not None:
            yield job_id, block
        elif running.get(array.job, 0) < (array.most_running or 0):
            running[array.job] = running.get(array.job, 0) + 1
        else:
            full[array.job] = Block(BlockKind.ARRAY, most_running=array.most_running)
            yield job_id, full[array.job]


def own_block(job: Job, at: datetime) -> Block | None:
    """Return what blocks a queued job, whatever other jobs run; None if nothing does."""
    options = job.queue
    if options.held:
        return _HELD
    if options.after:
        return Block(BlockKind.AFTER, after=options.after)
    if options.begin_at is not None and options.begin_at > at:
        of_try = options.retried + 1 if options.retried else None
        return Block(BlockKind.BEGIN, begin_at=options.begin_at, of_try=of_try)
    return None


def next_begin(found: Mapping[JobId, Block]) -> datetime | None:
    """Return the next begin time, at which the queue has to be planned again."""
    return min((each.begin_at for each in found.values() if each.begin_at), default=None)


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
        whole = elements.get(dependency.job, ())
        for target in whole if dependency.whole_array else (dependency.job,):
            if target in edited:
                return _path(target, waiting, came_from)
            if target not in came_from and target in jobs:
                came_from[target] = waiting
                found += [(target, each) for each in jobs[target].queue.after]
    return None


def _path(
    edited: JobId, last: JobId | None, came_from: Mapping[JobId, JobId | None]
) -> tuple[JobId, ...]:
    path = [edited]
    while last is not None:
        path.append(last)
        last = came_from[last]
    return (edited, *reversed(path))
