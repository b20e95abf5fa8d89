"""Why a queued job may not start now, apart from memory: held, begin time, dependencies, array.

The plan considers only the other jobs. A blocked job delays nobody, has no position, and does not
age.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
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
    after: tuple[Dependency, ...] = ()
    most_running: int | None = None

    def sentence(self, labels: Mapping[JobId, str]) -> str:
        """Return it as text; `labels` are the names of jobs that people know."""
        match self.kind:
            case BlockKind.HELD:
                return "held until gpulease edit --no-held"
            case BlockKind.BEGIN:
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
        return Block(BlockKind.BEGIN, begin_at=options.begin_at)
    return None


def next_begin(found: Mapping[JobId, Block]) -> datetime | None:
    """Return the next begin time, at which the queue has to be planned again."""
    return min((each.begin_at for each in found.values() if each.begin_at), default=None)
