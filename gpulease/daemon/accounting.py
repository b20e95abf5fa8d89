"""What keeps the accounts of jobs, built and wired: reports of pools, overheads, ends, sums."""

from collections.abc import Callable, Sequence
from pathlib import Path

from gpulease.daemon.pools import PoolWatch
from gpulease.daemon.sampling import Observer
from gpulease.daemon.tails import Tails
from gpulease.domain.job import Job
from gpulease.domain.memory import JobId
from gpulease.service.ending import Endings
from gpulease.service.keeper import Keeper
from gpulease.service.ports import InThread
from gpulease.service.usage import PoolSeen, Usage
from gpulease.store.accounts import Accounts
from gpulease.store.pools import Pools
from gpulease.store.repository import SqlStore


class Accounting:
    """The parts that have to do with what jobs take."""

    def __init__(self, store: SqlStore, driver: Callable[[], str | None]) -> None:
        self._store = store
        self.pools = Pools(store)
        self.usage = Usage(driver, self.pools.observed())
        self.accounts = Accounts(store)

    def pools_of(self, job: Job) -> Sequence[PoolSeen]:
        """Return what is known of the pools of a job that has not ended."""
        return self.usage.of(job.id)

    def attach(
        self,
        keeper: Keeper,
        directory_of: Callable[[JobId], Path],
        stops: Callable[[Job], bool],
        writing: InThread,
    ) -> Observer:
        """Have `keeper` settle the accounts of jobs that end; what is returned wants the looks."""
        endings = Endings(keeper, Tails(directory_of).of, self.usage.idle, stops)
        keeper.followers.examine = endings.examine
        return PoolWatch(self.usage, self.pools, self._store, writing).observe
