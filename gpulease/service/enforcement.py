"""Noting what holds a job to its leases: at its launch, before the first of its processes."""

from collections.abc import Collection, Mapping

from gpulease.domain.enforcement import Enclosed, limited_anew, stands_on
from gpulease.domain.job import Job
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.service.leases import existing
from gpulease.service.ports import Clock, Event, Store
from gpulease.units import format_size


def note_enclosed(
    store: Store, job_id: JobId, everywhere: Collection[str], enclosed: Enclosed, clock: Clock
) -> Job:
    """Store what holds the leases of a job that is about to be launched.

    Raises:
        RecordUnwritable: it cannot be stored at this moment.
    """
    with store.write() as tx:
        job = stands_on(existing(tx, job_id), everywhere, enclosed)
        tx.save(job, Event(clock.now(), "enclosed", _said(job, enclosed)))
    return job


def note_limits(
    store: Store, job_id: JobId, limits: Mapping[GpuUuid, int | None], said: str, clock: Clock
) -> Job:
    """Store the limits by the driver that a running job has now, and what is said of it.

    Raises:
        RecordUnwritable: it cannot be stored at this moment.
    """
    with store.write() as tx:
        job = limited_anew(existing(tx, job_id), limits)
        tx.save(job, Event(clock.now(), "enclosed", said))
    return job


def _said(job: Job, enclosed: Enclosed) -> str:
    """Return what was put around a job, in words."""
    limits = [format_size(limit) for limit in enclosed.limits.values()]
    held = [f"the driver keeps it to {' and '.join(limits)}"] if limits else []
    held += ["it can open its own GPUs alone"] if enclosed.devices else []
    return "; ".join((*held, *enclosed.missing)) or "nothing holds it from outside"
