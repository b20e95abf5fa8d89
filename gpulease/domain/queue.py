"""Who is next, and when the first in line may expect to start.

The order is by submission. A job that cannot start yet reserves each GPU that it waits for, so that
none who came later overtakes it there; on GPUs that can never serve it, others go ahead.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import ENDS_WITH_LEASES, ObstacleKind, Refusal


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Return queued jobs, the next one first."""
    return sorted(jobs, key=lambda job: job.id)


def reserves(claim: Claim, refusal: Refusal) -> frozenset[GpuUuid]:
    """Return the GPUs that must be kept for a refused claim.

    None if too few could ever serve it as things are: what it waits for (a stranger's process, a
    drained GPU) does not come sooner by making others wait.
    """
    in_reach = {*refusal.fits}
    for each in refusal.obstacles:
        if each.kind in ENDS_WITH_LEASES or each.kind is ObstacleKind.RESERVED:
            in_reach.add(each.gpu)
    return frozenset(in_reach) if len(in_reach) >= claim.gpus else frozenset()


def expected_start(
    claim: Claim,
    refusal: Refusal,
    gpus: Sequence[GpuMemory],
    ends: Mapping[JobId, datetime | None],
    now: datetime,
) -> datetime | None:
    """Return when `claim` fits if every running job ends at its time limit; None if unknowable.

    Args:
        claim: what was refused.
        refusal: why.
        gpus: the ledgers it was refused on.
        ends: the end of each job that holds memory; None for one without a time limit.
        now: the moment at which the refusal was made.
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
    """Return when enough leases on one GPU have ended, those with an end in order of it."""
    demand = claim.memory_on(gpu.allocatable or 0)
    free = (gpu.allocatable or 0) - (gpu.unmanaged or 0) - gpu.committed
    known = [(end, held) for held in gpu.entries if (end := ends.get(held.job)) is not None]
    left = {held.job for held in gpu.entries}
    exclusive = {held.job for held in gpu.entries if held.exclusive}
    for end, held in sorted(known, key=lambda pair: pair[0]):
        free += held.committed
        left.discard(held.job)
        empty_enough = not left if claim.exclusive or gpu.one_process else not (left & exclusive)
        if free >= demand and empty_enough:
            return end
    return None
