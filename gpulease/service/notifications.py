"""Notifications of users: stored with what they are about, and sent later.

`notify_owners` runs in the transaction in which a job changes. So each message is stored once,
whatever happens to the daemon.
"""

from collections.abc import Iterable
from datetime import datetime

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.notifications import (
    Message,
    NotifyEvent,
    about_array,
    first_of_array,
    message_on,
)
from gpulease.service.ports import Transaction


def notify_owners(tx: Transaction, changed: Iterable[tuple[Job | None, Job]]) -> None:
    """Store the messages about changes of jobs, each before and after one."""
    summed_up: set[JobId] = set()
    for before, after in changed:
        message = message_on(before, after)
        at = after.ended_at or after.started_at or after.submitted_at
        array = None if after.queue.array is None else after.queue.array.job
        if message is None:
            continue
        if array is None:
            tx.add_messages([(message, at)])
            continue
        if message.event is not NotifyEvent.END:
            add_once(tx, after, message, at)
        asks = after.state is State.ENDED and NotifyEvent.END in after.notify
        if asks and array not in summed_up and not tx.live_elements(array):
            summed_up.add(array)
            tx.add_messages([(about_array(after, *tx.array_result(array)), at)])


def add_once(
    tx: Transaction, job: Job, message: Message, at: datetime, since: datetime | None = None
) -> None:
    """Store a message, unless there was one about the same event of the job (since then).

    Of an array, the first element alone has one.
    """
    array = job.queue.array
    if not tx.has_message(job, message.event, since if array is None else None):
        message = message if array is None else first_of_array(message, array.job)
        tx.add_messages([(message, at)])
