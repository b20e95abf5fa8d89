"""What holds a job to its leases: the rungs of a ladder, from a wall down to an agreement.

Which rungs a machine has is found out by others; here is what they are called, in their order, and
how a job's leases come to stand on them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpulease.domain.job import Job
from gpulease.domain.memory import GpuUuid


class Rung(StrEnum):
    """One of the things that hold a job to its lease; in this order wherever they are shown."""

    DRIVER = "driver"
    """The driver's limit on the job's cgroup: an allocation beyond it fails."""
    FRAMEWORK = "framework"
    """The hooks in the job's own processes: honest programs stay inside."""
    WATCH = "watch"
    """What is used is compared with the lease, and something is done about it."""
    DEVICES = "devices"
    """The scope's device rules: a GPU that was not leased cannot be opened."""


@dataclass(frozen=True, slots=True)
class Enclosed:
    """What was put around a job before the first of its processes."""

    devices: bool = False
    """Its scope's device rules are in force."""
    limits: Mapping[GpuUuid, int] = field(default_factory=dict)
    """The bytes to which the driver keeps it, by GPU, as read back."""
    missing: tuple[str, ...] = ()
    """What this machine has and the job has not, a sentence each."""


_NOTHING = Enclosed()


def ladder(rungs: Iterable[str]) -> tuple[str, ...]:
    """Return each rung once, in the order of the ladder; what has another name comes last."""
    given = dict.fromkeys(rungs)
    known = [rung.value for rung in Rung if rung.value in given]
    return (*known, *(name for name in given if name not in known))


def as_watched(rungs: Iterable[str], *, stops: bool) -> tuple[str, ...]:
    """Return `rungs` with the watch among them if it `stops` jobs, and without it if not.

    What was noted at the launch holds for all users, and the settings may have changed since.
    """
    others = (rung for rung in rungs if rung != Rung.WATCH)
    return ladder((*others, Rung.WATCH.value) if stops else others)


def stands_on(job: Job, everywhere: Collection[str], enclosed: Enclosed = _NOTHING) -> Job:
    """Return `job` with what holds each of its leases noted.

    `everywhere` are the rungs that all leases of this machine stand on.
    """
    leases = []
    for lease in job.leases:
        limit = enclosed.limits.get(lease.gpu)
        rungs = set(everywhere)
        if limit is not None:
            rungs.add(Rung.DRIVER)
        if enclosed.devices:
            rungs.add(Rung.DEVICES)
        leases.append(replace(lease, enforced_by=ladder(rungs), driver_limit=limit))
    return replace(job, leases=tuple(leases))


def limited_anew(job: Job, limits: Mapping[GpuUuid, int | None]) -> Job:
    """Return `job` with the limits by the driver that some of its leases have now; None: none."""
    leases = []
    for lease in job.leases:
        if lease.gpu not in limits:
            leases.append(lease)
            continue
        rungs = set(lease.enforced_by or ()) - {Rung.DRIVER}
        limit = limits[lease.gpu]
        held = rungs | {Rung.DRIVER} if limit is not None else rungs
        leases.append(replace(lease, enforced_by=ladder(held), driver_limit=limit))
    return replace(job, leases=tuple(leases))
