"""What of the record is old enough, or so much, that it may be forgotten: ended jobs, and theirs.

The file does not shrink: SQLite uses the space again for what comes later, and the file stays as
large as the record ever was.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from gpulease.domain.gpu import JobId
from gpulease.domain.lease import State
from gpulease.store.store import SqlStore
from gpulease.store.tables import (
    EventRow,
    HolderRow,
    InvocationRow,
    JobRow,
    LeaseRow,
    PoolRow,
    SubmissionRow,
)

AT_ONCE = 500
"""Jobs in a transaction, so that a submission waits for no more than that."""


class Retention:
    """Finds and forgets old jobs."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def over(self, border: datetime, most: int) -> Sequence[JobId]:
        """Return some of the jobs that ended before `border` or are past a user's `most`."""
        ended = select(JobRow.id).where(JobRow.state == State.ENDED).order_by(JobRow.id)
        with Session(self._store.engine) as session:
            old = session.scalars(ended.where(JobRow.ended_at < border).limit(AT_ONCE)).all()
            if old:
                return [JobId(job) for job in old]
            counts = session.execute(select(JobRow.user, func.count()).group_by(JobRow.user)).all()
            for user, count in counts:
                if count <= most:
                    continue
                theirs = ended.where(JobRow.user == user)
                number = session.scalar(select(func.count()).select_from(theirs.subquery())) or 0
                if number > most:
                    oldest = session.scalars(theirs.limit(min(AT_ONCE, number - most))).all()
                    return [JobId(job) for job in oldest]
        return []

    def forget(self, jobs: Sequence[JobId]) -> None:
        """Delete ended jobs and all that belongs to them.

        Raises:
            RecordUnwritable: the file cannot be written at this moment.
        """
        with self._store.alone() as connection, connection.begin():
            for row in (EventRow, PoolRow, LeaseRow, HolderRow, InvocationRow, SubmissionRow):
                connection.execute(delete(row).where(row.job.in_(jobs)))
            gone = delete(JobRow).where(JobRow.id.in_(jobs), JobRow.state == State.ENDED)
            connection.execute(gone)
