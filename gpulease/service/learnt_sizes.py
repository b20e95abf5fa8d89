"""The sizes that jobs without --mem would get, by user and command, for other nodes of a cluster.

There the command chooses the size, before Slurm chooses the node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.memory_estimate import MOST_RUNS, size_for
from gpulease.fingerprint import CommandFingerprint
from gpulease.service.ports import InThread, Store, Transaction


class LearntSizes:
    """Keeps the sizes of the commands that ran last."""

    def __init__(self, store: Store, in_writer: InThread, most: int) -> None:
        """`most`: how many sizes are kept; a command has up to two."""
        self._store = store
        self._in_writer = in_writer
        self._most = most
        self._since: datetime | None = None
        self._seen: set[JobId] = set()
        """The jobs that ended at this very moment."""
        self._sizes: dict[tuple[int, str], int] = {}

    @property
    def sizes(self) -> Mapping[tuple[int, str], int]:
        """Bytes by uid and key of the fingerprint; those learnt last are at the end."""
        return self._sizes

    async def refresh(self) -> None:
        """Learn from the jobs that ended since the last call."""
        ended = self._store.jobs(None, "ended", self._most, since=self._since)
        new = [job for job in ended if job.id not in self._seen and _counts(job)]
        if ended:
            self._since = max(job.ended_at for job in ended if job.ended_at is not None)
            self._seen = {job.id for job in ended if job.ended_at == self._since}
        if new:
            await self._in_writer(lambda: self._learn(new))

    def _learn(self, jobs: Iterable[Job]) -> None:
        with self._store.write() as tx:
            for job in jobs:
                assert job.usage.fingerprint is not None, "others do not count"
                self._learn_of(tx, job.owner.uid, job.usage.fingerprint)
        while len(self._sizes) > self._most:
            del self._sizes[next(iter(self._sizes))]

    def _learn_of(self, tx: Transaction, uid: int, fingerprint: CommandFingerprint) -> None:
        # Without the exact key, all similar runs count.
        similar = replace(fingerprint, exact_key="")
        shapes = {fingerprint.similar_key: similar, fingerprint.exact_key: fingerprint}
        for key, shape in shapes.items():
            size = size_for(tx.past_runs(uid, shape, 1, MOST_RUNS))
            if size is not None:
                self._sizes.pop((uid, key), None)
                self._sizes[uid, key] = size


def _counts(job: Job) -> bool:
    claim = job.claim
    return job.usage.fingerprint is not None and claim.gpus == 1 and not claim.exclusive
