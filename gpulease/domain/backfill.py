"""The reservation for the job that has waited longest: particular GPUs, from a particular instant.

The instant is the first at which the job fits if running jobs end as expected. Another job may
start if it ends before, or if the reserved job fits beside it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.lease import Claim
from gpulease.domain.queue import Holding, Need
from gpulease.domain.queue_policy import QueuePolicy
from gpulease.domain.rooms import Room, Score, choose, fits
from gpulease.domain.run_time import RunTimes


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for one waiting job."""

    job: JobId
    at_s: float
    """When the job is expected to fit, in seconds."""
    hard: bool
    """Whether jobs count with their time limits, not with their predicted run times."""
    memory: Mapping[GpuUuid, int]
    """The bytes that it needs, on each of its GPUs."""
    rooms: Mapping[GpuUuid, Room]
    """What these GPUs will have free at that instant, beside the job."""

    def is_outlasted_by(
        self, need: Need, now_s: float, history: RunTimes, policy: QueuePolicy
    ) -> bool:
        """Tell whether a job that starts now may run into the reservation."""
        if self.hard:
            unlimited = policy.unlimited_run_time.total_seconds()
            span = unlimited if need.limit_s is None else need.limit_s
        else:
            span = policy.backfill_factor * need.run_time(history, policy)
            span = span if need.limit_s is None else min(span, need.limit_s)
        return now_s + span > self.at_s

    def leaves(self, gpu: GpuUuid, claim: Claim, utilization: float, policy: QueuePolicy) -> bool:
        """Tell whether a claim fits beside the reserved job, on one GPU."""
        later = self.rooms.get(gpu)
        return later is None or (fits(claim, later) and later.shares(utilization, policy))


@dataclass(frozen=True, slots=True)
class End:
    """The expected end of a job that holds memory."""

    at_s: float
    memory: tuple[tuple[GpuUuid, int], ...]
    exclusive: bool
    utilization: float


def expected_end(
    held: Holding, now_s: float, history: RunTimes, policy: QueuePolicy, *, hard: bool
) -> float:
    """Return when a job is expected to end, in seconds.

    A job that has run for longer than predicted is expected to run as long again. If `hard`, it
    uses its whole time limit.
    """
    elapsed = max(0.0, now_s - held.start_s)
    limit = held.need.limit_s
    if hard:
        assumed = policy.unlimited_run_time.total_seconds() if limit is None else limit
        # Past its limit it is about to end; without one, nothing is known.
        late = now_s if limit is not None else now_s + elapsed
        return held.start_s + assumed if assumed > elapsed else late
    left = max(held.need.run_time(history, policy) - elapsed, elapsed)
    return now_s + left if limit is None else min(now_s + left, max(held.start_s + limit, now_s))


def reserve(
    job: JobId,
    claim: Claim,
    utilization: float,
    rooms: Iterable[Room],
    ends: Iterable[End],
    policy: QueuePolicy,
    score: Score,
    *,
    hard: bool,
    latest_starts: Mapping[GpuUuid, float],
) -> Reservation | None:
    """Reserve GPUs for a claim that does not fit now; None if no end of a job makes it fit.

    The job must not start on a GPU after the instant in `latest_starts`, in seconds.
    """
    later = {room.uuid: room.copy() for room in rooms}
    servers: dict[str, list[Room]] = {}
    for room in later.values():
        servers.setdefault(room.server, []).append(room)
    for end in sorted(ends, key=lambda end: end.at_s):
        touched = set()
        for uuid, memory in end.memory:
            if uuid in later:
                later[uuid].release(memory, end.exclusive, end.utilization)
                touched.add(later[uuid].server)
        for server in touched:
            able = [
                room
                for room in servers[server]
                if end.at_s <= latest_starts.get(room.uuid, math.inf)
            ]
            chosen = _choice(claim, utilization, able, policy, score)
            if chosen is not None:
                return _taken(job, claim, utilization, chosen, end.at_s, hard=hard)
    return None


def _choice(
    claim: Claim,
    utilization: float,
    rooms: Sequence[Room],
    policy: QueuePolicy,
    score: Score,
) -> list[Room] | None:
    able = [room for room in rooms if fits(claim, room) and room.shares(utilization, policy)]
    return choose(claim, able, score)


def _taken(
    job: JobId,
    claim: Claim,
    utilization: float,
    rooms: Sequence[Room],
    at_s: float,
    *,
    hard: bool,
) -> Reservation:
    needed = {room.uuid: claim.memory_on(room.allocatable) for room in rooms}
    for room in rooms:
        room.take(needed[room.uuid], claim.exclusive, utilization)
    return Reservation(job, at_s, hard, needed, {room.uuid: room for room in rooms})
