"""What is drawn of a GPU and of running jobs: bars, colours of users, rows of jobs. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from gpulease.drawing import words
from gpulease.drawing.gpus import exclusive_job, places, remainder
from gpulease.wire.jobs import JobView, LeaseView
from gpulease.wire.machine import GpuView
from gpulease.wire.text import free_of, user_colour

UNKNOWN = "unknown"
"""A page has room for the word."""
known_size = partial(words.size, unknown=UNKNOWN)


def colors(users: Iterable[str | None]) -> Mapping[str | None, str]:
    """Return the classes of each user in style.css; of two with one colour the second is marked."""
    chosen: dict[str | None, str] = {}
    for user in sorted({each for each in users if each is not None}):
        own = f"o{user_colour(user)}"
        chosen[user] = f"{own} second" if own in chosen.values() else own
    return chosen


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar, in percent of the memory."""

    kind: str
    """The class in style.css."""
    at: float
    width: float
    what: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The memory of one GPU."""

    segments: Sequence[Segment]
    rest: str
    """What remains; nothing can be leased of it unless it is free."""
    used: int | None
    leased: int
    unmanaged: int
    free: int | None
    total: int | None

    @property
    def summary(self) -> str:
        """The bar in words."""
        parts = [f"{known_size(self.used)} used", f"{known_size(self.leased)} leased"]
        parts += [f"{known_size(self.unmanaged)} without a lease"] if self.unmanaged else []
        return f"{', '.join(parts)}, {known_size(self.free)} free of {known_size(self.total)}"


def bar_of(
    gpu: GpuView, jobs: Sequence[JobView], colors: Mapping[str | None, str], unmanaged: int
) -> Bar:
    """Return the bar of a GPU, on which `unmanaged` bytes are used without a lease.

    `colors` has the classes of each user.
    """
    memory = gpu.memory
    parts: list[tuple[str, int, str]] = []
    for job, lease in _leases_on(gpu, jobs):
        used, color = lease.used or 0, colors.get(job.user, "others")
        who = f"job {words.id_of(job)} of {job.user}"
        parts.append((f"used {color}", used, f"{who} uses {known_size(used)}"))
        more = max(0, lease.memory - used)
        parts.append((f"leased {color}", more, f"{who} has leased {known_size(more)} more"))
    parts.append(("unmanaged", unmanaged, f"{known_size(unmanaged)} without a lease"))
    segments = tuple(_segments(parts, memory.total)) if memory.total else ()
    alone, free = exclusive_job(gpu, jobs), free_of(gpu)
    rest = remainder(free, is_exclusive=alone is not None)
    return Bar(segments, rest, memory.used, memory.leased, unmanaged, free, memory.total)


def _segments(parts: Sequence[tuple[str, int, str]], total: int) -> Iterable[Segment]:
    # In hundredths of a percent.
    taken = places((amount for _, amount, _ in parts), total, 10_000)
    for (kind, _, what), (begin, end) in zip(parts, taken, strict=True):
        if end > begin:
            yield Segment(kind, begin / 100, (end - begin) / 100, what)


def held_by(gpu: GpuView, jobs: Sequence[JobView]) -> Sequence[tuple[str, int]]:
    """Return the users with leases on a GPU, those with the most first, and their bytes."""
    held: dict[str, int] = {}
    for job, lease in _leases_on(gpu, jobs):
        held[job.user] = held.get(job.user, 0) + lease.memory
    return sorted(held.items(), key=lambda each: (-each[1], each[0]))


def _leases_on(gpu: GpuView, jobs: Iterable[JobView]) -> Iterator[tuple[JobView, LeaseView]]:
    return ((job, each) for job in jobs for each in job.leases if each.gpu == gpu.uuid)


Remark = tuple[str, str]
remark_on = partial(words.remark_on, write=words.span_in_minutes)
"""Write the state of a job with regard to leases, in a text that changes at most once a minute."""


@dataclass(frozen=True, slots=True)
class Row:
    """A job that holds memory, or the elements of an array that run and have nothing to remark."""

    jobs: Sequence[JobView]
    remark: Remark

    @property
    def gpus(self) -> Sequence[str]:
        """The UUIDs of their GPUs."""
        return list(dict.fromkeys(lease.gpu for job in self.jobs for lease in job.leases))

    @property
    def leased(self) -> int:
        """Bytes of all leases."""
        return sum(lease.memory for job in self.jobs for lease in job.leases)

    @property
    def lease(self) -> str:
        """What is leased, in words, with its bound if it is one lease."""
        return words.lease_of([lease for job in self.jobs for lease in job.leases])

    @property
    def used(self) -> int | None:
        """Bytes in use; None if any is unknown."""
        used = [lease.used for job in self.jobs for lease in job.leases]
        return None if None in used else sum(each or 0 for each in used)

    @property
    def percent(self) -> float:
        """How much of the leases is used, at most 100."""
        return round(min(100, 100 * (self.used or 0) / self.leased), 1)

    @property
    def is_over(self) -> bool:
        """Whether a lease is exceeded by more than the tolerance."""
        return any(lease.over_since_at for job in self.jobs for lease in job.leases)

    @property
    def utilization(self) -> float | None:
        """The mean in percent; None if none is known."""
        known = [job.utilization for job in self.jobs if job.utilization is not None]
        return sum(known) / len(known) if known else None

    @property
    def since(self) -> str | None:
        """When the first of them started."""
        return min((job.started_at for job in self.jobs if job.started_at), default=None)

    @property
    def ends_at(self) -> str | None:
        """When the first of them is out of time."""
        return min((job.expires_at for job in self.jobs if job.expires_at), default=None)


def folded(jobs: Iterable[JobView], now: datetime) -> Sequence[Row]:
    """Return the rows of jobs that hold memory; elements of an array that simply run share one."""
    groups: dict[object, list[JobView]] = {}
    remarks: dict[int, Remark] = {}
    for job in jobs:
        remark = remark_on(job, job.leases, now)
        array = None if job.queue is None else job.queue.array
        key = job.id if array is None or remark[0] else ("array", array)
        groups.setdefault(key, []).append(job)
        remarks[job.id] = remark
    return [Row(group, remarks[group[0].id]) for group in groups.values()]
