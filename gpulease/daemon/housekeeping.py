"""What the daemon's timers do: sampling, backups, and checks of the state directory."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from gpulease.domain.lease import State
from gpulease.domain.memory_series import HOLDS_FOR_S, JobSpan, JobSpans
from gpulease.domain.snapshot import ledgers
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.host.state_dir import StateDirectory
from gpulease.service.job_samples import PoolOf, job_samples
from gpulease.service.log_once import LogOnce
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import Clock, InThread, Store
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import Usage
from gpulease.store.database_file import back_up, newest
from gpulease.store.memory_history import MemoryHistory, Sample
from gpulease.store.store import SqlStore
from gpulease.store.usage import PoolUsage

_log = logging.getLogger(__name__)

_DAILY = timedelta(days=1)


class Backups:
    """Copies the database when the last copy is too old."""

    def __init__(self, store: SqlStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._failures = LogOnce(_log)

    async def daily(self) -> None:
        """Make a copy if the last one is a day old; call this more often than daily."""
        try:
            if await asyncio.to_thread(self._is_due):
                await asyncio.to_thread(self._store.ensure_file)
                await asyncio.to_thread(back_up, self._store.path)
            self._failures.passed("copy")
        except RecordUnwritable as error:
            # Log damage each time, since it grows; log a failure that may pass once.
            if isinstance(error, RecordDamaged):
                _log.error("%s", error.text())
            else:
                self._failures.say("copy", f"{error.message}; trying again")

    def _is_due(self) -> bool:
        last = newest(self._store.path)
        if last is None:
            return True
        age_s = self._clock.now().timestamp() - last.stat().st_mtime
        # A copy from the future was made before the clock was set back.
        return not 0 <= age_s < _DAILY.total_seconds()


class FileWatch:
    """Notices within seconds that the database or the directory of the jobs was removed."""

    def __init__(self, store: SqlStore, state: StateDirectory, in_writer: InThread) -> None:
        self._store = store
        self._state = state
        self._in_writer = in_writer
        self._failures = LogOnce(_log)

    async def check(self) -> None:
        """Restore both if they are missing; log a failure once."""
        if await asyncio.to_thread(lambda: self._store.has_file() and self._state.jobs.is_dir()):
            self._failures.passed("file")
            self._failures.passed("jobs")
            return
        try:
            await self._in_writer(self._store.ensure_file)
            self._failures.passed("file")
        except RecordUnwritable as error:
            self._failures.say("file", error.text(), level=logging.ERROR)
        try:
            await asyncio.to_thread(self._state.ensure_jobs)
            self._failures.passed("jobs")
        except OSError as error:
            self._failures.say("jobs", f"cannot create {self._state.jobs}: {error.strerror}")


Subscriber = Callable[[Observation], Awaitable[None]]
"""Is called with each observation of the sampling timer, in their order."""


_MOST_UNWRITTEN = 3600
"""Samples that are kept in memory while the disk cannot take them; the oldest are dropped."""
_MOST_JOB_SPANS = 20_000
_REST = 10
"""Periods from one sample to the next while no job is queued or holds memory."""
_REST_BATCH = 6
"""Samples that are then written together, so that the disk of an idle machine may sleep."""
_LONGEST_LOOK_S = 1.0
"""For which a caller waits for a sample, before an older one is shown: the driver may hang."""


class Sampler:
    """Samples the memory of the GPUs at each call, and writes the samples in batches.

    While no job is queued or holds memory, nothing depends on the samples but the history. Then
    most calls do nothing, and a caller who looks at the GPUs causes a sample.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        history: MemoryHistory,
        clock: Clock,
        in_writer: InThread,
        pool_of: PoolOf = lambda *_: None,
        subscribers: Sequence[Subscriber] = (),
    ) -> None:
        self._scheduler = scheduler
        self._history = history
        self._clock = clock
        self._in_writer = in_writer
        self._subscribers = subscribers
        self._pool_of = pool_of
        self._unwritten: list[Sample] = []
        self._job_spans = JobSpans(_MOST_JOB_SPANS)
        self._failures = LogOnce(_log)
        self._is_resting = False
        """Whether there was no live job at the latest sample."""
        self._skipped = 0
        self._last_s: int | None = None
        self._sampling = asyncio.Lock()
        self._look: asyncio.Task[None] | None = None

    async def sample(self) -> None:
        """Take a sample; at rest, take one of ten."""
        self._skipped += 1
        if self._is_resting and self._skipped < _REST and not self._scheduler.store.live():
            return
        async with self._sampling:
            await self._sample()

    async def look(self) -> None:
        """Take a sample for a caller, unless the latest one is of this period."""
        if not self._is_resting or not self._skipped:
            return
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._sample_if_old(), name="look")
        await asyncio.wait({self._look}, timeout=_LONGEST_LOOK_S)

    async def _sample_if_old(self) -> None:
        async with self._sampling:
            if self._skipped:
                await self._sample()

    async def _sample(self) -> None:
        """Observe the GPUs. If jobs are queued, the scheduler looks: memory may be free now."""
        self._skipped = 0
        seen = await self._scheduler.observer.observe()
        live, holding = self._scheduler.store.live(), self._scheduler.store.holding()
        # A job that came during a rest was there for a second at most.
        seconds = min(self._since_last(seen.at), 1 if self._is_resting else HOLDS_FOR_S)
        self._is_resting = not live
        now = snapshot(holding, seen, self._scheduler.policy, {}, seen.at)
        gpus = ledgers(now)
        self._unwritten = [*self._unwritten[1 - _MOST_UNWRITTEN :], Sample(seen.at, gpus)]
        for span in job_samples(holding, gpus, seen, self._pool_of, seconds):
            self._job_spans.add(span)
        if any(job.state is State.QUEUED for job in live):
            self._scheduler.look(gpus)
        for subscriber in self._subscribers:
            await self._call(subscriber, seen)

    def _since_last(self, at: datetime) -> int:
        """Return the whole seconds since the last sample, which add up over all samples."""
        last, self._last_s = self._last_s, int(at.timestamp())
        return max(0, self._last_s - (last or self._last_s - 1))

    async def _call(self, subscriber: Subscriber, seen: Observation) -> None:
        """Pass an observation to one subscriber; its failure does not affect the others."""
        try:
            await subscriber(seen)
            self._failures.passed(subscriber)
        except RecordUnwritable as error:
            _log.debug("%s; the next observation is a new attempt", error.message)
        except Exception as error:  # noqa: BLE001 - logged in full; the next call is a new attempt
            self._failures.say(
                subscriber, "a check of the GPUs failed",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip

    def unwritten(self) -> tuple[Sequence[Sample], Sequence[JobSpan]]:
        """Return what is not on disk yet: samples of the GPUs, and spans of jobs."""
        return tuple(self._unwritten), self._job_spans.all()

    async def write_batch(self) -> None:
        """Store what was sampled since the last call; at rest, when there are some samples."""
        spans = self._job_spans.over(self._clock.now())
        if spans or not self._is_resting or len(self._unwritten) > _REST_BATCH:
            # It is not known yet for how long the latest sample holds.
            await self._write(spans, self._unwritten[:-1])

    async def write(self) -> None:
        """Store everything that was sampled since the last call."""
        await self._write(self._job_spans.all(), self._unwritten)

    async def _write(self, spans: Sequence[JobSpan], samples: Sequence[Sample]) -> None:
        if not samples and not spans:
            return
        peaks = dict(self._scheduler.peaks.by_lease)
        following = next(iter(self._unwritten[len(samples) :]), None)
        try:
            await self._in_writer(lambda: self._history.record(samples, peaks, spans, following))
        except RecordUnwritable as error:
            _log.debug("%s; the history stays in memory", error.message)
            return
        # Until now, readers found them here.
        written = set(map(id, samples))
        self._unwritten = [each for each in self._unwritten if id(each) not in written]
        self._job_spans.written(spans)
        self._scheduler.peaks.keep_only({job.id for job in self._scheduler.store.holding()})

    async def thin(self) -> None:
        """Aggregate old samples."""
        with contextlib.suppress(RecordUnwritable):
            await self._in_writer(lambda: self._history.thin(self._clock.now()))


_WRITE_POOLS_EVERY = timedelta(seconds=15)


class PoolWatch:
    """Combines reports of pools with observations, and stores the results at intervals."""

    def __init__(self, usage: Usage, pools: PoolUsage, store: Store, in_writer: InThread) -> None:
        self._usage = usage
        self._pools = pools
        self._store = store
        self._in_writer = in_writer
        self._wrote_at: datetime | None = None

    async def observe(self, seen: Observation) -> None:
        """Add an observation; write every 15 seconds."""
        await self._usage.observe(seen)
        since = None if self._wrote_at is None else seen.at - self._wrote_at
        if since is None or not timedelta(0) <= since < _WRITE_POOLS_EVERY:
            self._wrote_at = seen.at
            await self.write()

    async def write(self) -> None:
        """Store what has changed; after a failure, the next call stores it."""
        holding = {job.id for job in self._store.holding()}
        rows = self._usage.unwritten()
        # Retention may have removed a job in the meantime.
        on_record = [row for row in rows if self._store.job(row.job) is not None]
        try:
            await self._in_writer(lambda: self._pools.record(on_record))
        except RecordUnwritable as error:
            _log.debug("%s; the pools stay in memory", error.message)
            return
        self._usage.written(rows, holding)
