"""The room on each GPU during a planning pass, as plain numbers, and the choice among GPUs.

A `Room` takes and releases jobs in constant time. The ledgers in `gpu` say the same with every lease
by name; a pass tries thousands of claims and needs only sums.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpulease.domain.gpu import ComputeMode, GpuMemory, GpuUuid
from gpulease.domain.lease import Claim
from gpulease.domain.queue_policy import QueuePolicy


class Room:
    """What one GPU has free, now or at a later instant."""

    __slots__ = (
        "allocatable",
        "alone",
        "combines",
        "free",
        "jobs",
        "open",
        "rank",
        "server",
        "single",
        "spare",
        "strangers",
        "utilization",
        "uuid",
    )

    def __init__(self, gpu: GpuMemory, rank: int) -> None:
        """Take the sums of a ledger; `rank` is the place of the GPU in lists."""
        reading = gpu.reading
        known = gpu.allocatable is not None and gpu.unmanaged is not None
        self.uuid = gpu.uuid
        self.server = reading.server
        self.rank = rank
        self.allocatable = gpu.allocatable or 0
        self.single = gpu.one_process
        """It takes one job at a time."""
        self.strangers = gpu.has_unmanaged_process
        """It takes no exclusive job."""
        self.combines = reading.parent is None
        """It can be one of several GPUs of a job."""
        self.open = (
            known
            and reading.fault is None
            and not reading.mig_mode
            and gpu.drained is None
            and reading.compute_mode not in (None, ComputeMode.PROHIBITED)
            and not (gpu.one_process and gpu.has_unmanaged_compute)
        )
        self.jobs = len(gpu.entries)
        self.alone = sum(entry.exclusive for entry in gpu.entries)
        """Jobs on it that share with no other."""
        self.spare = self.allocatable - (gpu.unmanaged or 0) - gpu.committed
        self.utilization = None if reading.utilization is None else reading.utilization / 100
        """0 to 1; None if unknown."""
        self.free = 0
        """Bytes that may be leased now."""
        self._settle()

    def _settle(self) -> None:
        closed = not self.open or self.alone or (self.single and self.jobs)
        self.free = 0 if closed else max(0, self.spare)

    def copy(self) -> "Room":
        """Return a copy that may change by itself."""
        twin = Room.__new__(Room)
        for name in Room.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def take(self, memory: int, exclusive: bool, utilization: float | None) -> None:
        """Add a job."""
        self.jobs += 1
        self.alone += exclusive
        self.spare -= memory
        if self.utilization is not None:
            self.utilization += utilization or 0.0
        self._settle()

    def release(self, memory: int, exclusive: bool, utilization: float | None) -> None:
        """Remove a job."""
        self.jobs -= 1
        self.alone -= exclusive
        self.spare += memory
        if self.utilization is not None:
            left = self.utilization - (utilization or 0.0)
            self.utilization = max(0.0, left) if self.jobs else 0.0
        self._settle()

    def shares(self, utilization: float | None, policy: QueuePolicy) -> bool:
        """Tell whether it can take one more job of this utilization beside those on it."""
        if not self.jobs:
            return True
        if self.utilization is None or utilization is None:
            return self.jobs < policy.most_sharing
        return self.utilization + utilization <= policy.most_utilization


Score = Callable[[Claim, Room], float]
"""Says how good a GPU is for a claim; the highest wins, and among equals the first GPU."""


def best_fit(claim: Claim, room: Room) -> float:
    """Prefer the GPU with the least memory left."""
    return -room.free


def fits(claim: Claim, room: Room) -> bool:
    """Tell whether the memory of a claim is free on a GPU, whoever else is on it."""
    memory = claim.memory_on(room.allocatable)
    if not 0 < memory <= room.free or (claim.gpus > 1 and not room.combines):
        return False
    return not (claim.exclusive and (room.jobs or room.strangers))


def choose(claim: Claim, rooms: Sequence[Room], score: Score) -> list[Room] | None:
    """Choose among GPUs that fit; a job with several has all on one server. None: too few.

    Of several servers, the one with the fewest other GPUs that fit is taken, so that others stay
    whole.
    """
    if len(rooms) < claim.gpus:
        return None
    if claim.gpus == 1:
        best = max(score(claim, room) for room in rooms)
        equal = [room for room in rooms if score(claim, room) == best]
        if len(equal) == 1:
            return equal
        free: dict[str, int] = {}
        for room in rooms:
            free[room.server] = free.get(room.server, 0) + 1
        return [min(equal, key=lambda room: (free[room.server], room.rank))]
    servers: dict[str, list[Room]] = {}
    for room in rooms:
        servers.setdefault(room.server, []).append(room)
    wide = [each for each in servers.values() if len(each) >= claim.gpus]
    if not wide:
        return None
    best = [
        sorted(each, key=lambda room: (-score(claim, room), room.rank))[: claim.gpus]
        for each in wide
    ]
    totals = [sum(score(claim, room) for room in each) for each in best]
    order = sorted(range(len(best)), key=lambda n: (-totals[n], len(wide[n]), n))
    return sorted(best[order[0]], key=lambda room: room.rank)
