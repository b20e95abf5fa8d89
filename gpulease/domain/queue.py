"""The queue policy: the order of jobs, the GPUs that a waiting job reserves, the expected start.

Jobs start in the order of submission. A job that cannot start yet reserves every GPU that it waits
for, so no later job starts there before it. Later jobs may start on GPUs that cannot serve it.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import ENDS_WITH_LEASES, ObstacleKind, Refusal


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Return queued jobs in the order in which they start; the only place that knows it."""
    return sorted(jobs, key=lambda job: job.id)


def reserves(claim: Claim, refusal: Refusal) -> frozenset[GpuUuid]:
    """Return the GPUs to reserve for a refused claim.

    Empty if too few GPUs could serve it after leases end: it waits for something else (an unmanaged
    process, a drained GPU), and making other jobs wait does not help.
    """
    candidates = {*refusal.fits}
    for each in refusal.obstacles:
        if each.kind in ENDS_WITH_LEASES or each.kind is ObstacleKind.RESERVED:
            candidates.add(each.gpu)
    return frozenset(candidates) if len(candidates) >= claim.gpus else frozenset()


def expected_start(
    claim: Claim,
    refusal: Refusal,
    gpus: Sequence[GpuMemory],
    ends: Mapping[JobId, datetime | None],
    now: datetime,
) -> datetime | None:
    """Return when `claim` fits if every job runs until its time limit; None if unknown.

    Args:
        claim: what was refused.
        refusal: the reasons.
        gpus: the ledgers that it was refused on.
        ends: the end of each job that holds memory; None for one without a time limit.
        now: the time of the refusal.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    moments = [now] * len(refusal.fits)
    for each in refusal.obstacles:
        if each.kind not in ENDS_WITH_LEASES:
            continue
        moment = _free_at(claim, by_uuid[each.gpu], ends)
        if moment is not None:
            moments.append(max(now, moment))
    return sorted(moments)[claim.gpus - 1] if len(moments) >= claim.gpus else None


def _free_at(
    claim: Claim, gpu: GpuMemory, ends: Mapping[JobId, datetime | None]
) -> datetime | None:
    """Return when enough leases on one GPU have ended, in the order of their time limits."""
    memory = claim.memory_on(gpu.allocatable or 0)
    free = (gpu.allocatable or 0) - (gpu.unmanaged or 0) - gpu.committed
    known = [(end, held) for held in gpu.entries if (end := ends.get(held.job)) is not None]
    left = {held.job for held in gpu.entries}
    exclusive = {held.job for held in gpu.entries if held.exclusive}
    for end, held in sorted(known, key=lambda pair: pair[0]):
        free += held.committed
        left.discard(held.job)
        empty_enough = not left if claim.exclusive or gpu.one_process else not (left & exclusive)
        if free >= memory and empty_enough:
            return end
    return None
