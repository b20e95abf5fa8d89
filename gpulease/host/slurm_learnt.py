"""What commands and jobs needed on this node, for the summary that the node publishes.

The sizes are those that jobs without --mem get here. They are computed again when a job has ended.
"""

from collections.abc import Iterable
from datetime import timedelta

from gpulease.domain.gpu import JobId
from gpulease.domain.job import CommandFingerprint, Job
from gpulease.domain.memory_estimate import MOST_RUNS, size_for
from gpulease.service.ports import Clock, InThread, Store
from gpulease.slurm.learnt import MOST, learnt_keys

_REMEMBERED = timedelta(days=10)
_Known = tuple[int, CommandFingerprint]
"""A user and a command."""


class LearntSizes:
    """The sizes of the latest commands."""

    def __init__(self, store: Store, in_writer: InThread, clock: Clock) -> None:
        self._store = store
        self._in_writer = in_writer
        self._clock = clock
        self._latest: dict[_Known, None] | None = None
        """The latest last; None before the database was read."""
        self._held: frozenset[JobId] = frozenset()
        self.sizes: dict[str, int] = {}
        """Bytes, by `learnt_key`."""
        self.used: dict[str, int] = {}
        """Bytes that the latest jobs of Slurm needed, by number; only of this run of the daemon."""

    async def update(self) -> None:
        """Learn from the jobs that have ended since the last call."""
        held = frozenset(job.id for job in self._store.holding())
        before, self._held = self._held, held
        if self._latest is None:
            self._latest = {}
            past = self._store.past_jobs(self._clock.now() - _REMEMBERED)
            self._add((each.owner.uid, each.fingerprint) for each in past)
        elif before <= held:
            return
        else:
            ended = [*filter(None, map(self._store.job, sorted(before - held)))]
            self._note_used(ended)
            self._add((job.owner.uid, job.usage.fingerprint) for job in ended)
        latest = list(self._latest)
        self.sizes = await self._in_writer(lambda: self._compute(latest))

    def _add(self, runs: Iterable[tuple[int, CommandFingerprint | None]]) -> None:
        assert self._latest is not None, "the database was read"
        for uid, fingerprint in runs:
            if fingerprint is not None:
                self._latest.pop((uid, fingerprint), None)
                self._latest[uid, fingerprint] = None
        for old in list(self._latest)[: -MOST // 2]:
            del self._latest[old]

    def _note_used(self, ended: Iterable[Job]) -> None:
        for job in ended:
            most = max((lease.used for lease in job.leases if lease.used), default=None)
            if job.slurm is not None and most is not None:
                self.used[str(job.slurm.id)] = most
        for old in list(self.used)[:-MOST]:
            del self.used[old]

    def _compute(self, latest: Iterable[_Known]) -> dict[str, int]:
        sizes = {}
        with self._store.write() as tx:
            for uid, fingerprint in latest:
                similar = CommandFingerprint(fingerprint.similar_key, "")
                keys = learnt_keys(uid, fingerprint)
                for key, command in zip(keys, (fingerprint, similar), strict=True):
                    size = size_for(tx.past_runs(uid, command, 1, MOST_RUNS))
                    if size is not None:
                        sizes[key] = size
        return sizes
