"""The transaction in which jobs change, with the rules that apply before its commit."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.service.dependencies import settle_dependents
from gpulease.service.notifications import notify_owners
from gpulease.service.ports import Store, Transaction


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
