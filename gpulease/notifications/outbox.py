"""The notifications that are to be sent, and how attempts to send them went."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, func, not_, or_, select, update

from gpulease.domain.gpu import JobId
from gpulease.domain.notifications import Message, Notification, NotifyEvent
from gpulease.errors import RecordUnwritable
from gpulease.service.ports import Event
from gpulease.store import statements
from gpulease.store.rows import message_values
from gpulease.store.store import SqlStore
from gpulease.store.tables import JobRow, NotificationRow

KEPT_FOR = timedelta(days=7)
"""How long a notification stays on record after it was sent or given up."""
_IS_PENDING = NotificationRow.next_at.is_not(None)


def _new(uid: int, now: datetime, *, digest: bool) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for what may be sent to a user in one message now."""
    of_digest = NotificationRow.event == NotifyEvent.DIGEST
    return (
        NotificationRow.uid == uid,
        NotificationRow.next_at <= now,
        NotificationRow.attempts == 0,
        NotificationRow.event != NotifyEvent.COLLECTED,
        of_digest if digest else not_(of_digest),
    )


class Outbox:
    """Reads and changes notifications; only `waiting` may run in another thread than the writer."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def waiting(self) -> int | None:
        """Return how many are to be sent; None if the file cannot be read."""
        number = select(func.count()).where(_IS_PENDING)
        with suppress(RecordUnwritable), self._store.reading() as connection:
            return connection.scalar(number)
        return None

    def pending_users(self) -> dict[int, datetime]:
        """Return the users with notifications to be sent, and when each is due next."""
        due = select(NotificationRow.uid, func.min(NotificationRow.next_at)).where(_IS_PENDING)
        with self._store.write_connection() as connection:
            rows = connection.execute(due.group_by(NotificationRow.uid))
            return {uid: at for uid, at in rows if at is not None}

    def pending_ids(self) -> frozenset[int]:
        """Return the notifications that are to be sent."""
        with self._store.write_connection() as connection:
            return frozenset(connection.scalars(select(NotificationRow.id).where(_IS_PENDING)))

    def next_of(self, uid: int, now: datetime) -> Notification | None:
        """Return the first notification of a user that is due, or None."""
        of_user = select(*NotificationRow.__table__.c).where(_IS_PENDING)
        is_due = NotificationRow.uid == uid, NotificationRow.next_at <= now
        first = of_user.where(*is_due).order_by(NotificationRow.id).limit(1)
        with self._store.write_connection() as connection:
            row = connection.execute(first).first()
        return None if row is None else notification_of(row)

    def new_of(
        self, uid: int, now: datetime, most: int, *, digest: bool
    ) -> tuple[Sequence[str], int]:
        """Return the titles of the first new notifications of a user, and how many there are.

        `digest`: those of a digest, or all others.
        """
        new = _new(uid, now, digest=digest)
        # What did not succeed comes first; an array says how many of its elements did.
        is_good = NotificationRow.title.like("job % succeeded")
        order = (is_good, NotificationRow.id) if digest else (NotificationRow.id,)
        first = select(NotificationRow.title).where(*new).order_by(*order).limit(most)
        with self._store.write_connection() as connection:
            titles = connection.scalars(first).all()
            return titles, connection.scalar(select(func.count()).where(*new)) or 0

    def replace_new(self, message: Message, now: datetime, *, digest: bool) -> None:
        """Store a message in place of those that `new_of` has counted."""
        new = _new(message.uid, now, digest=digest)
        values = message_values(message, now)
        with self._store.write_connection() as connection:
            connection.execute(update(NotificationRow).where(*new).values(next_at=None))
            connection.exec_driver_sql(statements.ADD_MESSAGE, values)

    def settle(
        self,
        sent: Notification,
        attempts: int,
        next_at: datetime | None,
        error: str | None,
        failure: Event | None,
    ) -> None:
        """Store the result after so many attempts; `next_at` is that of the next one, or None.

        `failure` is added to the history of the job, unless that was deleted.
        """
        job = sent.message.job
        if failure is not None and job is not None:
            with self._store.write() as tx:
                if tx.job(job) is not None:
                    tx.note(job, failure)
        this = update(NotificationRow).where(NotificationRow.id == sent.id)
        values = {"attempts": attempts, "next_at": next_at, "error": error}
        with self._store.write_connection() as connection:
            connection.execute(this.values(values))

    def delete_old(self, now: datetime) -> None:
        """Delete what was sent or given up some days ago, unless its job or array still runs.

        It must not be announced again.
        """
        old = NotificationRow.next_at.is_(None), NotificationRow.at < now - KEPT_FOR
        arrays = select(JobRow.array).where(statements.LIVE, JobRow.array.is_not(None))
        live = select(JobRow.id).where(or_(statements.LIVE, JobRow.array.in_(arrays)))
        is_over = or_(NotificationRow.job.is_(None), NotificationRow.job.not_in(live))
        with self._store.write_connection() as connection:
            connection.execute(delete(NotificationRow).where(*old, is_over))


def notification_of(row: Row[Any]) -> Notification:
    """Return the notification that a row describes."""
    job = None if row.job is None else JobId(row.job)
    message = Message(row.uid, NotifyEvent(row.event), row.title, row.body, job)
    return Notification(row.id, message, row.attempts)
