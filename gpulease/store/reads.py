"""What both readers and the writer read: jobs, what they keep, and drained GPUs."""

from collections.abc import Mapping

from sqlalchemy import ColumnElement, Connection, func, select
from sqlalchemy.orm import Session

from gpulease.domain.job import Job
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.store.gpus import standings
from gpulease.store.rows import job_of
from gpulease.store.tables import HolderRow, InvocationRow, JobRow, LeaseRow


def jobs_where(session: Session, which: ColumnElement[bool]) -> list[Job]:
    """Read jobs with their leases and holders, by id."""
    rows = session.scalars(select(JobRow).where(which).order_by(JobRow.id)).all()
    leases: dict[int, list[LeaseRow]] = {}
    of_these = select(JobRow.id).where(which)
    for lease in session.scalars(
        select(LeaseRow).where(LeaseRow.job.in_(of_these)).order_by(LeaseRow.place)
    ):
        leases.setdefault(lease.job, []).append(lease)
    of_holds = select(HolderRow).where(HolderRow.job.in_(of_these))
    holders = {holder.job: holder for holder in session.scalars(of_holds)}
    return [job_of(row, leases.get(row.id, ()), holders.get(row.id)) for row in rows]


def invocation_sizes(session: Session) -> dict[JobId, int]:
    """Return how many bytes each live job's arguments and environment take, packed."""
    sizes = session.execute(select(InvocationRow.job, func.length(InvocationRow.content)))
    return {JobId(job): size for job, size in sizes}


def drained_gpus(connection: Connection) -> Mapping[GpuUuid, str]:
    """Return the GPUs on which nothing more may be granted, and why."""
    return {
        gpu: standing.closed
        for gpu, standing in standings(connection).items()
        if standing.closed is not None
    }
