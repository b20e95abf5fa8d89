"""The memory of a GPU as a bar: who uses it, who has leased it, and what is free."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulease.web.text import size
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView
from gpulease.wire.text import free_of


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
    """The class of what remains: free, unless nothing can be leased there."""
    used: int | None
    leased: int
    unmanaged: int
    free: int | None
    total: int | None

    @property
    def summary(self) -> str:
        """The bar in words."""
        parts = [f"{size(self.used)} used", f"{size(self.leased)} leased"]
        parts += [f"{size(self.unmanaged)} without a lease"] if self.unmanaged else []
        return f"{', '.join(parts)}, {size(self.free)} free of {size(self.total)}"


def bar_of(
    gpu: GpuView, jobs: Sequence[JobView], colors: Mapping[str | None, str], unmanaged: int
) -> Bar:
    """Return the bar of a GPU, on which `unmanaged` bytes are used without a lease.

    `colors` has the classes of each user.
    """
    memory = gpu.memory
    parts: list[tuple[str, int, str]] = []
    for job in jobs:
        for lease in job.leases:
            if lease.gpu == gpu.uuid:
                used, color = lease.used or 0, colors.get(job.user, "others")
                who = f"job {job.label or job.id} of {job.user}"
                parts.append((f"used {color}", used, f"{who} uses {size(used)}"))
                rest = max(0, lease.memory - used)
                parts.append((f"leased {color}", rest, f"{who} has leased {size(rest)} more"))
    parts.append(("unmanaged", unmanaged, f"{size(unmanaged)} without a lease"))
    segments = tuple(_segments(parts, memory.total)) if memory.total else ()
    free = free_of(gpu)
    remainder = "free" if free else "closed"
    if (alone := exclusive_job(gpu, jobs)) is not None:
        remainder = f"leased {colors.get(alone.user, 'others')}"
    return Bar(segments, remainder, memory.used, memory.leased, unmanaged, free, memory.total)


def exclusive_job(gpu: GpuView, jobs: Iterable[JobView]) -> JobView | None:
    """Return the job that has a GPU alone."""
    alone = (job for job in jobs if job.claim.exclusive)
    return next((job for job in alone if any(each.gpu == gpu.uuid for each in job.leases)), None)


def _segments(parts: Iterable[tuple[str, int, str]], total: int) -> Iterable[Segment]:
    at = 0.0
    for kind, amount, what in parts:
        width = min(100 * amount / total, 100 - at)
        if width > 0:
            yield Segment(kind, round(at, 2), round(width, 2), what)
            at += width
