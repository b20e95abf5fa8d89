"""Keeps the state directory from growing for ever: old output goes first, at last the record.

Sees to it that the database is where it belongs, and that there are recent copies of it.

What the timers do: look at the GPUs, keep the history, thin it, and wake the loop.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from gpulease.config import Settings
from gpulease.domain.gpu import JobId
from gpulease.domain.lease import State
from gpulease.domain.plan import ledgers
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.host.state_dir import StateDirectory
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
"""Bytes that st_blocks counts in, whatever the file system; holes are not counted."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The output of one ended job."""

    job: JobId
    uid: int
    size: int
    """Bytes on disk."""


class StateCleaner:
    """Removes what is older, or more, than the settings keep."""

    def __init__(
        self,
        state: StateDirectory,
        store: SqlStore,
        settings: Callable[[], Settings],
        clock: Clock,
        writing: InThread,
    ) -> None:
        self._state = state
        self._store = store
        self._settings = settings
        self._clock = clock
        self._writing = writing
        self._pruning = Retention(store)
        self._kept: dict[JobId, _Kept] = {}
        """What was measured; the output of an ended job does not change."""

    async def shed_output(self) -> None:
        """Remove output until what is left of ended jobs is within bounds.

        The oldest goes first, of whoever keeps the most: who floods the disk loses their own.
        """
        await asyncio.to_thread(self._shed_output)

    def _shed_output(self) -> None:
        self._measure()
        most = self._settings().most_output
        if isinstance(most, Share):
            most = most.of(shutil.disk_usage(self._state.path).total)
        for kept in too_much(self._kept.values(), most):
            self._remove(kept.job)

    def _measure(self) -> None:
        found = set(self._on_disk())
        for gone in self._kept.keys() - found:
            del self._kept[gone]
        for number in found - self._kept.keys():
            job = self._store.job(number)
            if job is not None and job.ended_at is not None:
                size = _size_of(self._state.job(number))
                self._kept[number] = _Kept(number, job.owner.uid, size)

    async def remove_what_is_old(self) -> None:
        """Remove the output and the record of jobs that ended longer ago than they are kept."""
        settings, now = self._settings(), self._clock.now()
        await asyncio.to_thread(self._remove_output_before, now - settings.keep_output_for)
        border = now - settings.keep_jobs_for
        while True:
            over = await asyncio.to_thread(self._pruning.over, border, settings.most_ended)
            if not over:
                return
            # First what the record alone leads to.
            await asyncio.to_thread(self._remove_all, over)
            try:
                await self._writing(partial(self._pruning.forget, over))
            except RecordUnwritable as error:
                _log.debug("%s; old jobs stay on record meanwhile", error.message)
                return

    def _on_disk(self) -> list[JobId]:
        names = [each.name for each in self._state.jobs.iterdir()]
        return [JobId(int(name)) for name in names if name.isdecimal()]

    def _remove_output_before(self, border: datetime) -> None:
        for number in self._on_disk():
            job = self._store.job(number)
            if job is not None and job.ended_at is not None and job.ended_at < border:
                self._remove(job.id)

    def _remove_all(self, jobs: Sequence[JobId]) -> None:
        for job in jobs:
            self._remove(job)

    def _remove(self, job: JobId) -> None:
        shutil.rmtree(self._state.job(job), ignore_errors=True)
        self._kept.pop(job, None)


def too_much(kept: Iterable[_Kept], most: int) -> list[_Kept]:
    """Return what has to go so that at most `most` bytes are left, and in which order."""
    by_user: dict[int, list[_Kept]] = {}
    for each in sorted(kept, key=lambda one: one.job, reverse=True):
        by_user.setdefault(each.uid, []).append(each)
    sums = {uid: sum(each.size for each in theirs) for uid, theirs in by_user.items()}
    going = []
    while sum(sums.values()) > most:
        uid = max(sums, key=lambda one: sums[one])
        oldest = by_user[uid].pop()
        sums[uid] -= oldest.size
        going.append(oldest)
    return going


def _size_of(directory: Path) -> int:
    try:
        return sum(entry.stat().st_blocks * _BLOCK for entry in directory.iterdir())
    except OSError:
        return 0


_AT_START_AFTER = timedelta(hours=1)
"""A daemon that is started again and again shall not push out the older copies."""
_DAILY = timedelta(days=1)


class Backups:
    """Copies the database when the last copy has grown old."""

    def __init__(self, store: SqlStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._complaints = LogOnce(_log)

    async def at_start(self) -> None:
        """Copy it unless that was done within the hour."""
        await self._copy_after(_AT_START_AFTER)

    async def daily(self) -> None:
        """Copy it if that was not done for a day; to be called more often than that."""
        await self._copy_after(_DAILY)

    async def _copy_after(self, span: timedelta) -> None:
        try:
            if await asyncio.to_thread(self._age_is_over, span):
                await asyncio.to_thread(self._back_up)
            self._complaints.passed("copy")
        except RecordUnwritable as error:
            # What passes is said once; damage each time, since what can be saved grows less.
            if isinstance(error, RecordDamaged):
                _log.error("%s", error.text())
            else:
                self._complaints.say("copy", f"{error.message}; trying again")

    def _back_up(self) -> None:
        self._store.ensure_file()
        back_up(self._store.path)

    def _age_is_over(self, span: timedelta) -> bool:
        last = newest(self._store.path)
        if last is None:
            return True
        age_s = self._clock.now().timestamp() - last.stat().st_mtime
        # One from the future was made before the clock was set.
        return not 0 <= age_s < span.total_seconds()


class FileWatch:
    """Notices within seconds that the database or the directory of the jobs was removed."""

    def __init__(self, store: SqlStore, state: StateDirectory, writing: InThread) -> None:
        self._store = store
        self._state = state
        self._writing = writing
        self._complaints = LogOnce(_log)

    async def look(self) -> None:
        """Make sure of both; what is wrong is logged once."""
        try:
            await self._writing(self._store.ensure_file)
            self._complaints.passed("file")
        except RecordUnwritable as error:
            self._complaints.say("file", error.text(), level=logging.ERROR)
        try:
            await asyncio.to_thread(self._state.ensure_jobs)
            self._complaints.passed("jobs")
        except OSError as error:
            self._complaints.say("jobs", f"cannot make {self._state.jobs}: {error.strerror}")


Observer = Callable[[Observation], Awaitable[None]]
"""Is shown each look that a timer took, in the order of the looks."""


_MOST_UNWRITTEN = 3600
"""Samples that are held while the disk cannot take them; then the oldest are let go."""


class Sampler:
    """Takes a sample of the GPUs' memory each time it is called, and writes some at a time."""

    def __init__(
        self,
        keeper: Scheduler,
        occupancy: MemoryHistory,
        clock: Clock,
        writing: InThread,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._observers = observers
        self._keeper = keeper
        self._occupancy = occupancy
        self._clock = clock
        self._writing = writing
        self._unwritten: list[Sample] = []
        self._complaints = LogOnce(_log)

    async def sample(self) -> None:
        """Look at the GPUs; wake the loop if somebody waits for what may have come free."""
        seen = await self._keeper.look()
        live = self._keeper.store.live()
        now = snapshot(live, seen, self._keeper.policy, {}, seen.at)
        self._unwritten.append(Sample(seen.at, ledgers(now)))
        del self._unwritten[:-_MOST_UNWRITTEN]
        if any(job.state is State.QUEUED for job in live):
            self._keeper.wake()
        for observe in self._observers:
            await self._shown(seen, observe)

    async def _shown(self, seen: Observation, observe: Observer) -> None:
        """Show a look to one observer; that it fails keeps nothing from the others."""
        try:
            await observe(seen)
            self._complaints.passed(observe)
        except RecordUnwritable as error:
            _log.debug("%s; what was seen is looked at again", error.message)
        except Exception as error:  # noqa: BLE001 - told in full; the next look is a new try
            self._complaints.say(
                observe, "an observer of the GPUs failed",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip

    async def write(self) -> None:
        """Store the samples taken since the last time."""
        samples, peaks = self._unwritten, dict(self._keeper.peaks.by_lease)
        if not samples:
            return
        self._unwritten = []
        try:
            await self._writing(lambda: self._occupancy.record(samples, peaks))
        except RecordUnwritable as error:
            _log.debug("%s; the history is kept in memory meanwhile", error.message)
            self._unwritten = [*samples, *self._unwritten][-_MOST_UNWRITTEN:]
            return
        self._keeper.peaks.forget_all_but({job.id for job in self._keeper.store.live()})

    async def thin(self) -> None:
        """Fold what has grown old."""
        with contextlib.suppress(RecordUnwritable):
            await self._writing(lambda: self._occupancy.thin(self._clock.now()))


class IdleTimer:
    """Tells when nothing has happened for so long that a personal daemon may leave."""

    def __init__(self, keeper: Scheduler, clock: Clock, connections: Callable[[], int]) -> None:
        self._keeper = keeper
        self._clock = clock
        self._connections = connections
        self._busy_at = clock.steady()

    def idle_s(self) -> float:
        """Return for how many seconds there has been neither a live job nor a caller."""
        if self._keeper.store.live() or self._connections():
            self._busy_at = self._clock.steady()
        return (self._clock.steady() - self._busy_at).total_seconds()
