"""Which preemptible jobs make way for a job that does not fit, so that the least work is lost.

Work of a higher priority class counts above all work of a lower one. What a job loses is its run
time so far, and the time that every restart takes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.lease import Claim
from gpulease.domain.queue_options import Priority
from gpulease.domain.queue_policy import QueuePolicy
from gpulease.domain.rooms import Room, best_fit, choose, fits

_CLASSES = len(Priority)
RESTART_S = 60.0
"""What a restart costs besides the lost work: of two ways, the one with fewer jobs is better."""


@dataclass(frozen=True, slots=True)
class Preemptible:
    """A running job that makes way for others."""

    job: JobId
    rank: int
    """Of its priority class, 0 for the highest, which makes way last."""
    ran_s: float
    memory: Mapping[GpuUuid, int]
    """The bytes that it leases, by GPU."""
    exclusive: bool = False
    utilization: float | None = None

    @property
    def loss(self) -> float:
        """The GPU-seconds that are lost when it makes way."""
        return (self.ran_s + RESTART_S) * len(self.memory)


def who_makes_way(
    claim: Claim,
    utilization: float | None,
    rooms: Sequence[Room],
    running: Iterable[Preemptible],
    policy: QueuePolicy,
) -> tuple[Preemptible, ...] | None:
    """Return the jobs without which `claim` fits, none of them in excess; None if that is no help.

    The best choice takes time exponential in the number of jobs. This is the best of some good
    ones: on each GPU, the cheapest jobs first, and the largest first.
    """
    wanted = _Wanted(claim, utilization, policy)
    running = tuple(running)
    ways = (
        way
        for part in _parts(claim, rooms)
        for order in (_by_loss, _by_size)
        if (way := wanted.way(part, sorted(_on(part, running), key=order))) is not None
    )
    return min(ways, key=_cost, default=None)


def without(rooms: Iterable[Room], gone: Iterable[Preemptible]) -> list[Room]:
    """Return copies of `rooms` after these jobs have ended."""
    left = {room.uuid: room.copy() for room in rooms}
    for each in gone:
        _release(left, each)
    return list(left.values())


def _release(rooms: Mapping[GpuUuid, Room], gone: Preemptible) -> None:
    for uuid, memory in gone.memory.items():
        if uuid in rooms:
            rooms[uuid].release(memory, gone.exclusive, gone.utilization)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A claim that does not fit."""

    claim: Claim
    utilization: float | None
    policy: QueuePolicy

    def has_room(self, rooms: Iterable[Room]) -> bool:
        able = [
            room
            for room in rooms
            if fits(self.claim, room) and room.shares(self.utilization, self.policy)
        ]
        return choose(self.claim, able, best_fit) is not None

    def way(
        self, rooms: Sequence[Room], in_order: Sequence[Preemptible]
    ) -> tuple[Preemptible, ...] | None:
        """Return the first of the jobs that are enough, without those that are not needed."""
        left = {room.uuid: room.copy() for room in rooms}
        going: list[Preemptible] = []
        for each in in_order:
            if self.has_room(left.values()):
                break
            _release(left, each)
            going.append(each)
        if not self.has_room(left.values()):
            return None
        for each in sorted(going, key=_by_loss, reverse=True):
            others = [other for other in going if other is not each]
            if self.has_room(without(rooms, others)):
                going = others
        return tuple(going)


def _parts(claim: Claim, rooms: Sequence[Room]) -> Iterable[Sequence[Room]]:
    """Return the sets of GPUs to make room on: each GPU alone, or for several each server."""
    if claim.gpus == 1:
        return [[room] for room in rooms]
    servers: dict[str, list[Room]] = {}
    for room in rooms:
        servers.setdefault(room.server, []).append(room)
    return servers.values()


def _on(rooms: Sequence[Room], running: Iterable[Preemptible]) -> list[Preemptible]:
    known = {room.uuid for room in rooms}
    return [each for each in running if known & each.memory.keys()]


def _by_loss(job: Preemptible) -> tuple[int, float, JobId]:
    return -job.rank, job.loss, job.job


def _by_size(job: Preemptible) -> tuple[int, float, JobId]:
    return -job.rank, -sum(job.memory.values()), job.job


def _cost(way: Sequence[Preemptible]) -> tuple[float, ...]:
    """Return the loss in each priority class, the highest class first."""
    return tuple(sum(each.loss for each in way if each.rank == rank) for rank in range(_CLASSES))
