"""Which GPUs suit a claim, by name, model and size, and the choice among those with free memory.

A planning pass tries thousands of claims and needs only sums, so it has each GPU as a `PlannedGpu`.
The ledgers in `gpu` say the same with every lease by name.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from gpulease.domain.gpu import ComputeMode, GpuMemory, GpuReading
from gpulease.domain.lease import Claim
from gpulease.domain.links import best_linked, linked_set
from gpulease.domain.queue_options import QueuePolicy
from gpulease.units import format_size

T = TypeVar("T")

_USABLE = 0.92
"""The least part of the memory in the name of a GPU that its driver reports as the total.

ECC takes a sixteenth on cards with GDDR memory, and the driver some more: an "A10 24GB" reports
22.2 GiB. No two sizes that are sold are as close as that.
"""


def suits(claim: Claim, gpu: GpuReading) -> bool:
    """Tell whether a GPU is one that `claim` asks for."""
    return _is_named(claim, gpu) and _is_model(claim, gpu) and _is_large_enough(claim, gpu)


def why_unsuitable(claim: Claim, gpu: GpuReading) -> str | None:
    """Return why a GPU is not one that `claim` asks for; None if it is."""
    if not _is_named(claim, gpu):
        return "it is not one of the GPUs asked for"
    if not _is_model(claim, gpu):
        return f"its model is {gpu.name}, not {claim.model}"
    if not _is_large_enough(claim, gpu):
        return f"it has {format_size(gpu.total or 0)}, less than {format_size(claim.min_vram or 0)}"
    return None


def _is_named(claim: Claim, gpu: GpuReading) -> bool:
    # The name of a GPU that MIG divides stands for its MIG devices.
    return not claim.named or gpu.uuid in claim.named or gpu.parent in claim.named


def _is_model(claim: Claim, gpu: GpuReading) -> bool:
    return claim.model is None or is_model(claim.model, gpu.name)


@lru_cache(maxsize=1024)
def is_model(wanted: str, name: str) -> bool:
    """Tell whether the name of a GPU has the wanted words: A10 is in "NVIDIA A10", not in "A100".

    Upper and lower case are the same.
    """
    words = rf"(?<![^\W_]){re.escape(wanted.strip())}(?![^\W_])"
    return re.search(words, name, re.IGNORECASE) is not None


def _is_large_enough(claim: Claim, gpu: GpuReading) -> bool:
    """Tell whether a GPU has the wanted size; a size that is not known now counts as enough."""
    return claim.min_vram is None or gpu.total is None or gpu.total >= claim.min_vram * _USABLE


def sets_of(
    claim: Claim, gpus: Iterable[T], reading: Callable[[T], GpuReading]
) -> Mapping[Hashable, list[T]]:
    """Return the sets of GPUs that a job may have together: of one server, perhaps of one model."""
    found: dict[Hashable, list[T]] = {}
    for gpu in gpus:
        read = reading(gpu)
        key = (read.server, read.name) if claim.same_model else read.server
        found.setdefault(key, []).append(gpu)
    return found


_NO_ROOM = 1 << 62
_ROUNDING = 1e-6
CALM = 1.0
"""The sum of utilizations up to which jobs on a GPU hardly slow each other down."""


class PlannedGpu:
    """What one GPU has free, now or later; it takes and releases jobs in constant time."""

    __slots__ = (
        "allocatable",
        "alone",
        "combines",
        "free",
        "growth",
        "jobs",
        "open",
        "rank",
        "reading",
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
        self.reading = reading
        self.rank = rank
        self.allocatable = gpu.allocatable or 0
        self.single = gpu.one_process
        """It takes one job at a time."""
        self.strangers = gpu.has_unmanaged_process or bool(reading.neighbours)
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
        taken = gpu.committed + (gpu.unmanaged or 0) + reading.leased_elsewhere
        self.spare = self.allocatable - taken
        self.growth = sum(entry.growth for entry in gpu.entries)
        """Bytes that jobs with ranges on it may use besides."""
        self.utilization = None if reading.utilization is None else reading.utilization / 100
        """0 to 1; None if unknown."""
        self.free = 0
        """Bytes that may be leased now."""
        self._settle()

    def _settle(self) -> None:
        closed = not self.open or self.alone or (self.single and self.jobs)
        self.free = 0 if closed else max(0, self.spare)

    def copy(self) -> "PlannedGpu":
        """Return a copy that may change by itself."""
        twin = PlannedGpu.__new__(PlannedGpu)
        for name in PlannedGpu.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def take(self, claim: Claim, utilization: float) -> int:
        """Add a job, and return the bytes that its claim takes."""
        memory = claim.memory_on(self.allocatable)
        self.jobs += 1
        self.alone += claim.exclusive
        self.spare -= memory
        self.growth += self._growth(claim, memory)
        self.add_load(utilization)
        self._settle()
        return memory

    def _growth(self, claim: Claim, memory: int) -> int:
        return max(0, (claim.bound_on(self.allocatable) or 0) - memory)

    def add_load(self, utilization: float) -> None:
        """Count utilization that is not measured yet."""
        if self.utilization is not None:
            self.utilization += utilization

    def count_at_least(self, utilization: float) -> None:
        """Count this utilization if less was measured: no reading exceeds 1."""
        if self.utilization is not None:
            self.utilization = max(self.utilization, utilization)

    def release(self, claim: Claim, memory: int, utilization: float) -> None:
        """Remove a job, which may use more than its claim takes."""
        self.jobs -= 1
        self.alone -= claim.exclusive
        self.spare += memory
        self.growth -= self._growth(claim, memory)
        if self.utilization is not None:
            self.utilization = max(0.0, self.utilization - utilization) if self.jobs else 0.0
        self._settle()

    @property
    def server(self) -> str:
        """The machine that the GPU is in."""
        return self.reading.server

    def is_calm_with(self, utilization: float) -> bool:
        """Tell whether it can take one more job of this utilization without slowing any down."""
        return not self.jobs or (self.utilization or 0.0) + utilization <= CALM + _ROUNDING

    def shares(self, utilization: float, policy: QueuePolicy) -> bool:
        """Tell whether it can take one more job of this utilization beside those on it."""
        if not self.jobs:
            return True
        if self.utilization is None:
            return self.jobs < policy.most_sharing
        return self.utilization + utilization <= policy.most_utilization + _ROUNDING


Score = Callable[[Claim, PlannedGpu], float]
"""Says how good a GPU is for a claim; the highest wins, and among equals the first GPU."""


def best_fit(claim: Claim, gpu: PlannedGpu) -> float:
    """Prefer the GPU with the least memory left; for a range, one with room up to the bounds.

    Jobs with ranges would share a GPU and ask each other for memory while another GPU is empty.
    """
    bound = claim.bound_on(gpu.allocatable)
    if bound is None:
        return -gpu.free
    room = gpu.free - gpu.growth
    return -room if room >= bound else room - _NO_ROOM


def fits(claim: Claim, gpu: PlannedGpu) -> bool:
    """Tell whether a GPU has the free memory that a claim needs, however busy it is."""
    memory = claim.memory_on(gpu.allocatable)
    if not 0 < memory <= gpu.free or (claim.gpus > 1 and not gpu.combines):
        return False
    if claim.is_choosy and not suits(claim, gpu.reading):
        return False
    return not (claim.exclusive and (gpu.jobs or gpu.strangers))


def together(claim: Claim, gpus: Iterable[PlannedGpu]) -> Iterable[Sequence[PlannedGpu]]:
    """Return the sets of GPUs that a job may have together, without those that do not suit it."""
    suited = [gpu for gpu in gpus if not claim.is_choosy or suits(claim, gpu.reading)]
    return sets_of(claim, suited, _reading).values()


def _reading(gpu: PlannedGpu) -> GpuReading:
    return gpu.reading


def most_free(claim: Claim, gpus: Iterable[PlannedGpu]) -> int:
    """Return the most memory that is free on each of as many GPUs as `claim` asks for."""
    sets = ([gpu.free for gpu in each] for each in together(claim, gpus))
    wide = (sorted(free)[-claim.gpus] for free in sets if len(free) >= claim.gpus)
    return max(wide, default=0)


def enough_of(
    claim: Claim, gpus: Iterable[T], reading: Callable[[T], GpuReading]
) -> Sequence[T] | None:
    """Return as many GPUs as a claim asks for, such as it may have together; None: too few."""
    for each in sets_of(claim, gpus, reading).values():
        if len(each) >= claim.gpus and not claim.linked:
            return each[: claim.gpus]
        places = linked_set([reading(gpu) for gpu in each], claim.gpus) if claim.linked else None
        if places is not None:
            return [each[place] for place in places]
    return None


def suffice(claim: Claim, gpus: Iterable[PlannedGpu]) -> bool:
    """Tell whether there are enough among GPUs that fit, so that `choose` finds some."""
    return enough_of(claim, gpus, _reading) is not None


def choose(claim: Claim, gpus: Sequence[PlannedGpu], score: Score) -> list[PlannedGpu] | None:
    """Choose among GPUs that fit, all on one server, perhaps of one model. None: too few.

    Of several GPUs, those with the best links between them are taken, and among equals those with
    the best score, of the server with the fewest others that fit: whole servers stay free for wide
    jobs.
    """
    best, chosen = None, None
    for on_server in sets_of(claim, gpus, _reading).values():
        if len(on_server) < claim.gpus:
            continue
        rated = sorted((-score(claim, gpu), gpu.rank, gpu) for gpu in on_server)
        places: Iterable[int] | None = range(claim.gpus)
        if claim.gpus > 1 and (claim.linked or any(gpu.reading.links for gpu in on_server)):
            readings, costs = [gpu.reading for *_, gpu in rated], [each[0] for each in rated]
            places = best_linked(readings, costs, claim.gpus, by_nvlink=claim.linked)
        if places is None:
            continue
        rated = [rated[place] for place in places]
        rating = sum(each[0] for each in rated), len(on_server), rated[0][1]
        if best is None or rating < best:
            best, chosen = rating, rated
    return None if chosen is None else sorted((gpu for *_, gpu in chosen), key=lambda gpu: gpu.rank)
