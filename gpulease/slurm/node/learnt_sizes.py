"""What commands and jobs needed on this node, for the summary that the node publishes.

The sizes are those that jobs without --mem get here. They are computed again when a job has ended.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from gpulease.domain.gpu import JobId
from gpulease.domain.job import CommandFingerprint
from gpulease.domain.memory_estimate import MOST_RUNS, size_for
from gpulease.errors import RecordUnwritable
from gpulease.service.job_history import EndedJob, EndedJobsQuery
from gpulease.service.ports import Clock, InThread, Store
from gpulease.slurm.node_summary import MOST, learnt_keys

_REMEMBERED = timedelta(days=10)
_Known = tuple[int, CommandFingerprint]
"""A user and a command."""


class LearntSizes:
    """The sizes of the latest commands."""

    def __init__(
        self,
        store: Store,
        ended_jobs: Callable[[EndedJobsQuery], Sequence[EndedJob]],
        in_writer: InThread,
        clock: Clock,
    ) -> None:
        self._store = store
        self._ended_jobs = ended_jobs
        self._in_writer = in_writer
        self._clock = clock
        self._latest: dict[_Known, None] | None = None
        """The latest last; None before the database was read."""
        self._held: frozenset[JobId] = frozenset()
        self.sizes: dict[str, int] = {}
        """Bytes, by `learnt_key`."""
        self.used: dict[str, int] = {}
        """Bytes that the latest jobs of Slurm needed, by number."""

    async def update(self) -> None:
        """Learn from the jobs that have ended since the last call."""
        held = frozenset(job.id for job in self._store.holding())
        before, self._held = self._held, held
        if self._latest is None:
            self._latest = {}
            since = self._clock.now() - _REMEMBERED
            past = self._store.past_jobs(since)
            self._read_used(since)
            self._add((each.owner.uid, each.fingerprint) for each in past)
        elif before <= held:
            return
        else:
            ended = [*filter(None, map(self._store.job, sorted(before - held)))]
            for job in ended:
                used = [lease.used for lease in job.leases if lease.used]
                number = None if job.slurm is None else job.slurm.id
                self._note_used(number, max(used, default=None))
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

    def _read_used(self, since: datetime) -> None:
        """Read what jobs used that ended under an earlier daemon."""
        with suppress(RecordUnwritable):  # as for `past_jobs`
            for job in reversed(self._ended_jobs(EndedJobsQuery(since=since))):
                self._note_used(job.slurm_job, job.used)

    def _note_used(self, number: int | None, most: int | None) -> None:
        if number is not None and most is not None:
            self.used.pop(str(number), None)
            self.used[str(number)] = most
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
