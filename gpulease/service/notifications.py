"""Notifications of users: stored with what they are about, and sent later.

`notify_owners` runs in the transaction in which a job changes. So each message is stored once,
whatever happens to the daemon.
"""

from collections.abc import Iterable
from datetime import datetime

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.notifications import (
    Message,
    message_on,
    message_on_time,
    time_is_short,
    time_is_short_from,
)
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, InThread, Store, Transaction


def notify_owners(tx: Transaction, changed: Iterable[tuple[Job | None, Job]]) -> None:
    """Store the messages about changes of jobs, each before and after one."""
    found = [(message_on(before, after), after) for before, after in changed]
    tx.add_messages([(message, _changed_at(job)) for message, job in found if message is not None])


def _changed_at(job: Job) -> datetime:
    return job.ended_at or job.started_at or job.submitted_at


def add_once(
    tx: Transaction, message: Message, at: datetime, since: datetime | None = None
) -> bool:
    """Store a message, unless there was one about the same event of the job (since then)."""
    assert message.job is not None, "it is about a job"
    if tx.has_message(message.job, message.event, since):
        return False
    tx.add_messages([(message, at)])
    return True


class TimeLeftWatch:
    """Notifies owners of jobs when the time limit is near, at observations of the GPUs."""

    def __init__(self, store: Store, clock: Clock, in_writer: InThread) -> None:
        self._store = store
        self._clock = clock
        self._in_writer = in_writer
        self._notified: set[tuple[JobId, datetime | None]] = set()
        """Each job with the end of its time, which its owner may extend."""

    async def observe(self, _: Observation) -> None:
        """Store the messages that are due.

        Raises:
            RecordUnwritable: they cannot be stored now; the next call tries again.
        """
        now = self._clock.now()
        running = [job for job in self._store.holding() if job.notify]
        self._notified &= {(job.id, job.expires_at) for job in running}
        short = [job for job in running if time_is_short(job, now)]
        due = [job for job in short if (job.id, job.expires_at) not in self._notified]
        if due:
            await self._in_writer(lambda: self._notify(due, now))
            self._notified |= {(job.id, job.expires_at) for job in due}

    def _notify(self, due: Iterable[Job], now: datetime) -> None:
        with self._store.write() as tx:
            for job in due:
                add_once(tx, message_on_time(job, now), now, time_is_short_from(job))
