"""What the daemon's timers do: sampling, backups, retention, and checks of the state directory."""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from gpulease.config import Settings
from gpulease.domain.gpu import JobId
from gpulease.domain.lease import State
from gpulease.domain.memory_series import HOLDS_FOR_S, JobSpan, JobSpans
from gpulease.domain.snapshot import ledgers
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.host.state_dir import StateDirectory
from gpulease.service.job_samples import PoolOf, job_samples
from gpulease.service.log_once import LogOnce
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import Clock, InThread
from gpulease.service.scheduler import Scheduler
from gpulease.store.database_file import back_up, newest
from gpulease.store.memory_history import MemoryHistory, Sample
from gpulease.store.retention import Retention
from gpulease.store.store import SqlStore
from gpulease.units import Share

_log = logging.getLogger(__name__)

_BLOCK = 512
"""The unit of st_blocks in bytes, on every file system; holes are not counted."""


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output of one ended job."""

    job: JobId
    uid: int
    ended_at: datetime
    size: int
    """Bytes on disk."""


class StateCleaner:
    """Removes output and records that are older, or more, than the settings keep."""

    def __init__(
        self,
        state: StateDirectory,
        store: SqlStore,
        settings: Callable[[], Settings],
        clock: Clock,
        in_writer: InThread,
    ) -> None:
        self._state = state
        self._store = store
        self._settings = settings
        self._clock = clock
        self._in_writer = in_writer
        self._retention = Retention(store)
        self._kept: dict[JobId, KeptOutput] = {}
        """Measured once per job, since the output of an ended job does not change."""

    async def limit_output(self) -> None:
        """Remove output of ended jobs until the rest is within the limit (most_output).

        Starts with the oldest output of the user who keeps the most, so that users who fill the
        disk lose their own output.
        """
        await asyncio.to_thread(self._limit_output)

    def _limit_output(self) -> None:
        self._measure()
        most = self._settings().most_output
        if isinstance(most, Share):
            most = most.of(shutil.disk_usage(self._state.path).total)
        for kept in over_limit(self._kept.values(), most):
            self._remove(kept.job)

    def _measure(self) -> None:
        found = set(self._state.numbers())
        for gone in self._kept.keys() - found:
            del self._kept[gone]
        for number, uid, ended_at in self._store.ended(found - self._kept.keys()):
            size = _size_of(self._state.job(number))
            self._kept[number] = KeptOutput(number, uid, ended_at, size)

    async def remove_old(self) -> None:
        """Remove output and records after their retention periods."""
        settings, now = self._settings(), self._clock.now()
        await asyncio.to_thread(self._remove_output_before, now - settings.keep_output_for)
        border = now - settings.keep_jobs_for
        while True:
            over = await asyncio.to_thread(self._retention.expired, border, settings.most_ended)
            if not over:
                return
            # The output first: only the record leads to it.
            await asyncio.to_thread(self._remove_all, over)
            try:
                await self._in_writer(partial(self._retention.delete, over))
            except RecordUnwritable as error:
                _log.debug("%s; old jobs stay on record", error.message)
                return

    def _remove_output_before(self, border: datetime) -> None:
        self._measure()
        for kept in [each for each in self._kept.values() if each.ended_at < border]:
            self._remove(kept.job)

    def _remove_all(self, jobs: Sequence[JobId]) -> None:
        for job in jobs:
            self._remove(job)

    def _remove(self, job: JobId) -> None:
        shutil.rmtree(self._state.job(job), ignore_errors=True)
        self._kept.pop(job, None)


def over_limit(kept: Iterable[KeptOutput], most: int) -> list[KeptOutput]:
    """Return the outputs to remove, in order, so that at most `most` bytes are left."""
    by_user: dict[int, list[KeptOutput]] = {}
    for each in sorted(kept, key=lambda one: one.job, reverse=True):
        by_user.setdefault(each.uid, []).append(each)
    sums = {uid: sum(each.size for each in theirs) for uid, theirs in by_user.items()}
    removed = []
    while sum(sums.values()) > most:
        uid = max(sums, key=lambda one: sums[one])
        oldest = by_user[uid].pop()
        sums[uid] -= oldest.size
        removed.append(oldest)
    return removed


def _size_of(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:  # paths would double the time for many jobs
            return sum(each.stat(follow_symlinks=False).st_blocks * _BLOCK for each in entries)
    except OSError:
        return 0


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
                await asyncio.to_thread(self._back_up)
            self._failures.passed("copy")
        except RecordUnwritable as error:
            # Log damage each time, since it grows; log a failure that may pass once.
            if isinstance(error, RecordDamaged):
                _log.error("%s", error.text())
            else:
                self._failures.say("copy", f"{error.message}; trying again")

    def _back_up(self) -> None:
        self._store.ensure_file()
        back_up(self._store.path)

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
        if await asyncio.to_thread(self._are_there):
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

    def _are_there(self) -> bool:
        return self._store.has_file() and self._state.jobs.is_dir()


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
        """Observe the GPUs, and wake the scheduler if jobs are queued: memory may be free now."""
        self._skipped = 0
        seen = await self._scheduler.observer.observe()
        live = self._scheduler.store.live()
        # A job that came during a rest was there for a second at most.
        seconds = min(self._since_last(seen.at), 1 if self._is_resting else HOLDS_FOR_S)
        self._is_resting = not live
        now = snapshot(live, seen, self._scheduler.policy, {}, seen.at)
        gpus = ledgers(now)
        self._unwritten = [*self._unwritten[1 - _MOST_UNWRITTEN :], Sample(seen.at, gpus)]
        for span in job_samples(live, gpus, seen, self._pool_of, seconds):
            self._job_spans.add(span)
        if any(job.state is State.QUEUED for job in live):
            self._scheduler.wake()
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
        if spans or not self._is_resting or len(self._unwritten) >= _REST_BATCH:
            await self._write(spans)

    async def write(self) -> None:
        """Store everything that was sampled since the last call."""
        await self._write(self._job_spans.all())

    async def _write(self, spans: Sequence[JobSpan]) -> None:
        samples, peaks = self._unwritten, dict(self._scheduler.peaks.by_lease)
        if not samples and not spans:
            return
        try:
            await self._in_writer(lambda: self._history.record(samples, peaks, spans))
        except RecordUnwritable as error:
            _log.debug("%s; the history stays in memory", error.message)
            return
        # Until now, readers found them here.
        written = set(map(id, samples))
        self._unwritten = [each for each in self._unwritten if id(each) not in written]
        self._job_spans.written(spans)
        self._scheduler.peaks.keep_only({job.id for job in self._scheduler.store.live()})

    async def thin(self) -> None:
        """Aggregate old samples."""
        with contextlib.suppress(RecordUnwritable):
            await self._in_writer(lambda: self._history.thin(self._clock.now()))


class IdleTimer:
    """Measures how long a personal daemon has had nothing to do."""

    def __init__(self, scheduler: Scheduler, clock: Clock, connections: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._connections = connections
        self._busy_at = clock.steady()

    def idle_s(self) -> float:
        """Return the seconds since the last live job or connection."""
        if self._scheduler.store.live() or self._connections():
            self._busy_at = self._clock.steady()
        return (self._clock.steady() - self._busy_at).total_seconds()
