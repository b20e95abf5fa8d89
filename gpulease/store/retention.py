"""Deletes ended jobs that are too old or too many, and everything that belongs to them.

The file does not shrink: SQLite reuses the space.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, func, select

from gpulease.domain.gpu import JobId
from gpulease.domain.lease import State
from gpulease.store.memory_history import delete_job_memory
from gpulease.store.statements import LIVE
from gpulease.store.store import SqlStore
from gpulease.store.tables import (
    EventRow,
    HolderRow,
    HookRow,
    InvocationRow,
    JobRow,
    LeaseRow,
    NotificationRow,
    PoolRow,
    SubmissionRow,
)

_OF_A_JOB = (
    EventRow,
    HookRow,
    PoolRow,
    LeaseRow,
    HolderRow,
    InvocationRow,
    NotificationRow,
    SubmissionRow,
)
BATCH = 500
"""Jobs deleted in one transaction, so that submissions do not wait long."""


class Retention:
    """Finds and deletes old jobs."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def expired(self, border: datetime, most: int) -> Sequence[JobId]:
        """Return up to `BATCH` jobs that ended before `border` or exceed `most` for their user."""
        # The first element of an array stays until the last has ended: it has their invocation.
        live = select(JobRow.array).where(LIVE, JobRow.array.is_not(None))
        is_used = JobRow.id.in_(live)
        ended = select(JobRow.id).where(JobRow.state == State.ENDED, ~is_used)
        with self._store.reading() as connection:
            old = connection.scalars(
                ended.where(JobRow.ended_at < border).order_by(JobRow.ended_at).limit(BATCH)
            ).all()
            if old:
                return [JobId(job) for job in old]
            counts = connection.execute(
                select(JobRow.user, func.count()).group_by(JobRow.user)
            ).all()
            for user, count in counts:
                if count <= most:
                    continue
                theirs = ended.where(JobRow.user == user)
                number = connection.scalar(select(func.count()).select_from(theirs.subquery())) or 0
                if number > most:
                    oldest = connection.scalars(
                        theirs.order_by(JobRow.id).limit(min(BATCH, number - most))
                    ).all()
                    return [JobId(job) for job in oldest]
        return []

    def delete(self, jobs: Sequence[JobId]) -> None:
        """Delete ended jobs and everything that belongs to them.

        Raises:
            RecordUnwritable: the file cannot be written now.
        """
        with self._store.write_connection() as connection:
            delete_job_memory(connection, jobs)
            for row in _OF_A_JOB:
                connection.execute(delete(row).where(row.job.in_(jobs)))
            gone = delete(JobRow).where(JobRow.id.in_(jobs), JobRow.state == State.ENDED)
            connection.execute(gone)
        self._store.forget(jobs)
