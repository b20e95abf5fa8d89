"""The transaction in which jobs change, with the rules that apply before its commit.

The messages about a change are stored in the transaction of the change. So each is stored once,
whatever happens to the daemon.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from gpulease.service.dependencies import settle_dependents
from gpulease.service.ports import Store, Transaction

_SUMMED_UP = frozenset({NotifyEvent.END, NotifyEvent.DIGEST})
"""Events of which an array has one message, after its last element."""


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
        if message.event not in _SUMMED_UP:
            add_once(tx, after, message, at)
        asks = after.state is State.ENDED and not _SUMMED_UP.isdisjoint(after.notify)
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


@contextmanager
def change_jobs(store: Store) -> Iterator[Transaction]:
    """Open the one write transaction, and settle what follows from its changes of jobs.

    Whatever ends a job goes through here, so that no way to end can leave other jobs waiting for
    it. `Store.write` is for what changes no job. Raises like `Store.write`.
    """
    with store.write() as tx:
        yield tx
        settle_dependents(tx, tx.ended())
        # After the dependents: those that end for it have owners, too.
        notify_owners(tx, tx.changed())
