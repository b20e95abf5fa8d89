"""The watch over promised memory that is in use outside any lease: look, decide, remember.

A stranger, or what a driver keeps, can take memory of a GPU that is leased to jobs there. Nothing
can be done about that for them; but their owners are to know why an allocation within the lease
fails. As with the watch over use, a finding is `settled` when its owner has been notified.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from gpulease.domain.job import Job
from gpulease.domain.lease import Lease, State
from gpulease.domain.memory import GpuMemory, GpuUuid, JobId
from gpulease.units import MIB

_NOTICEABLE = 256 * MIB
"""What a driver keeps for itself or a display takes comes and goes, and is less than this."""
_ENOUGH_LOOKS = 2
"""A process that begins at the very moment of a look may not be known as its job's yet."""
_OVER_AFTER = timedelta(minutes=5)
"""A shortfall that comes back sooner is the same one, of which the owner knows."""
_Key = tuple[JobId, GpuUuid]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A lease that may not get all that it was granted; sizes in bytes."""

    job: Job
    lease: Lease
    label: str
    """Of the GPU, as people call it."""
    unmanaged: int
    """What is used there outside any lease."""
    promised: int
    """How much of that is leased."""


@dataclass(slots=True)
class _Occurrence:
    seen_at: timedelta
    looks: int = 0
    """How many looks in a row have shown it."""
    notified: bool = False


class ShortfallWatch:
    """Remembers from look to look which leases are short of memory."""

    def __init__(self) -> None:
        self._occurrences: dict[_Key, _Occurrence] = {}

    def look(
        self, jobs: Sequence[Job], gpus: Sequence[GpuMemory], now: timedelta
    ) -> list[Shortfall]:
        """Take in the ledgers of one look; return the shortfalls that their owners do not know.

        `now` is when the look was, by a clock that nobody can set.
        """
        running = {job.id: job for job in jobs if job.state is State.ACTIVE}
        short = {(each.job.id, each.lease.gpu): each for each in _shortfalls(running, gpus)}
        for key in [key for key in self._occurrences if key[0] not in running]:
            del self._occurrences[key]
        for key, occurrence in self._occurrences.items():
            if key not in short:
                occurrence.looks = 0
        return [each for key, each in short.items() if self._is_news(key, now)]

    def _is_news(self, key: _Key, now: timedelta) -> bool:
        occurrence = self._occurrences.get(key)
        if occurrence is None or now - occurrence.seen_at > _OVER_AFTER:
            occurrence = self._occurrences[key] = _Occurrence(now)
        occurrence.seen_at = now
        occurrence.looks += 1
        return occurrence.looks >= _ENOUGH_LOOKS and not occurrence.notified

    def settled(self, found: Shortfall) -> None:
        """Note that the owner of a lease knows of its shortfall."""
        self._occurrences[found.job.id, found.lease.gpu].notified = True


def _shortfalls(running: dict[JobId, Job], gpus: Sequence[GpuMemory]) -> Iterator[Shortfall]:
    for gpu in gpus:
        promised = _promised_and_taken(gpu)
        if promised <= _NOTICEABLE:
            continue
        for holding in gpu.holdings:
            # One that has all of its lease already can lose none of it.
            has_all = holding.used is not None and holding.used >= holding.memory
            job = running.get(holding.job)
            if job is not None and not has_all:
                (lease,) = (each for each in job.leases if each.gpu == gpu.uuid)
                yield Shortfall(job, lease, gpu.reading.label, gpu.unmanaged or 0, promised)


def _promised_and_taken(gpu: GpuMemory) -> int:
    """Return how much of a GPU's memory is both leased and in use outside any lease.

    The margin is leased to nobody: what others use of it is missed by nobody.
    """
    if gpu.allocatable is None or gpu.reading.total is None or gpu.unmanaged is None:
        return 0
    capacity = gpu.reading.total - (gpu.reading.reserved or 0)
    return min(gpu.unmanaged, gpu.leased + gpu.unmanaged - capacity)
