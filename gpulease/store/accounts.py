"""What ended jobs asked for and used, summed by user."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Float, cast, func, select
from sqlalchemy.orm import Session

from gpulease.domain.account import Use
from gpulease.domain.lease import State
from gpulease.store.faults import told
from gpulease.store.repository import SqlStore
from gpulease.store.tables import JobRow, LeaseRow

_MICROSECONDS = 1_000_000


class Accounts:
    """Reads what jobs asked for and used."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def by_user(self, user: str | None, since: datetime | None) -> Sequence[Use]:
        """Sum the ended jobs of which the use is known, of one user or of all, by user.

        `since` is when they ended at the earliest.
        """
        held_for = cast(LeaseRow.released_at - LeaseRow.granted_at, Float) / _MICROSECONDS
        wanted = (
            select(
                JobRow.user,
                func.count(JobRow.id.distinct()),
                func.count(JobRow.id.distinct()).filter(JobRow.out_of_memory),
                func.total(held_for),
                func.total(held_for * LeaseRow.memory),
                func.total(held_for * LeaseRow.used),
            )
            .join(LeaseRow, LeaseRow.job == JobRow.id)
            .where(JobRow.state == State.ENDED, LeaseRow.used.is_not(None))
            .group_by(JobRow.user)
            .order_by(JobRow.user)
        )
        if user is not None:
            wanted = wanted.where(JobRow.user == user)
        if since is not None:
            wanted = wanted.where(JobRow.ended_at >= since)
        with told(self._store.path), Session(self._store.engine) as session:
            return [Use(*row) for row in session.execute(wanted)]
