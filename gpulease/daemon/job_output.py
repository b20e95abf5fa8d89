"""The output of jobs on disk: shortened for space, removed with age, and read at its end.

Each shim limits the logs of its own job. This module handles what no single shim can see: the sum
of all logs, logs without a shim, and space that other programs take. Both limits take from the user
who keeps the most, so that users who fill the disk lose their own output.

`free_space` needs no database, which cannot be opened without free space.
"""

import asyncio
import heapq
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from gpulease.config import Settings
from gpulease.domain.gpu import JobId
from gpulease.errors import RecordUnwritable
from gpulease.host.state_dir import JOBS, StateDirectory
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import Clock, InThread
from gpulease.shim.output import LEAST_KEPT, shorten_log
from gpulease.store.retention import Retention
from gpulease.store.store import SqlStore
from gpulease.units import Share, format_size

_log = logging.getLogger(__name__)

_BLOCK = 512
"""The unit of st_blocks in bytes, on every file system; holes are not counted."""
_STREAMS = ("stdout", "stderr")
_LARGEST_PART = 10
"""At most one tenth of the disk is kept free, even if `keep_free` is more."""
_NOTICE = "the oldest part of this job's output was removed: {}"

Notify = Callable[[JobId, str], Awaitable[None]]


@dataclass(frozen=True, slots=True, order=True)
class Log:
    """One log of one job on disk."""

    size: int
    """Bytes on disk."""
    job: JobId
    name: str
    uid: int
    """The job's owner."""


def kept_free(settings: Settings) -> int:
    """Return the bytes of the disk to keep free.

    Raises:
        OSError: the size of the disk cannot be read.
    """
    return min(settings.keep_free, shutil.disk_usage(settings.state).total // _LARGEST_PART)


class DiskSpace:
    """Shortens logs that take too much space, and restores the reserve of the database."""

    def __init__(self, store: SqlStore, settings: Callable[[], Settings], notify: Notify) -> None:
        """`notify` sends a notice to the owner of a job."""
        self._store = store
        self._settings = settings
        self._notify = notify
        self._notified: set[JobId] = set()
        self._failures = LogOnce(_log)

    async def limit_running(self) -> None:
        """Shorten logs of running jobs until their sum is within most_running_output."""
        running = [job.id for job in self._store.holding()]
        self._notified &= set(running)
        if not running:
            return
        cut = await self._in_thread(lambda: self._limit_running(running))
        await self._notify_owners(
            cut, "the output of all running jobs has reached its limit (most_running_output)"
        )

    async def keep_free(self) -> None:
        """Shorten logs of all jobs until the disk has enough space, and restore the reserve."""
        cut = await self._in_thread(self._keep_free)
        running = {job.id for job in self._store.holding()}
        await self._notify_owners([job for job in cut if job in running], "the disk is nearly full")

    async def _in_thread(self, shorten: Callable[[], list[JobId]]) -> list[JobId]:
        """Return what `shorten` returns; log once that the state directory cannot be read."""
        try:
            cut = await asyncio.to_thread(shorten)
        except OSError as error:
            text = f"cannot check the disk space of {self._settings().state}: {error.strerror}"
            self._failures.say("space", f"{text}; trying again")
            return []
        self._failures.passed("space")
        return cut

    def _limit_running(self, running: Iterable[JobId]) -> list[JobId]:
        settings = self._settings()
        jobs = settings.state / JOBS
        most = settings.most_running_output
        if isinstance(most, Share):
            most = most.of(shutil.disk_usage(settings.state).total)
        logs = [log for job in running for log in _logs_of(jobs, job)]
        return _shorten_all(jobs, logs, sum(log.size for log in logs) - most)

    def _keep_free(self) -> list[JobId]:
        cut = free_space(self._settings(), self._store.reserve.missing)
        self._store.reserve.refill(kept_free(self._settings()))
        return cut

    async def _notify_owners(self, cut: Iterable[JobId], why: str) -> None:
        for job in set(cut) - self._notified:
            # Once: the output of a job that continues to write is shortened every few seconds.
            self._notified.add(job)
            try:
                await self._notify(job, _NOTICE.format(why))
            except RecordUnwritable as error:
                _log.warning("%s; no notice to job %s: %s", error.message, job, why)


def free_space(settings: Settings, reserve: int) -> list[JobId]:
    """Shorten the logs of all jobs if the disk has too little free space; return those jobs.

    Also runs before the database is opened. `reserve`: bytes to free in addition.

    Raises:
        OSError: the state directory cannot be read.
    """
    jobs = settings.state / JOBS
    lacking = kept_free(settings) + reserve - shutil.disk_usage(settings.state).free
    if lacking <= 0 or not jobs.is_dir():
        return []
    numbers = [JobId(int(each.name)) for each in jobs.iterdir() if each.name.isdecimal()]
    return _shorten_all(jobs, (log for job in numbers for log in _logs_of(jobs, job)), lacking)


def _logs_of(jobs: Path, job: JobId) -> list[Log]:
    """Return the logs of a job. Its owner is the owner of its socket."""
    directory, found = jobs / str(job), []
    try:
        uid = (directory / "socket").lstat().st_uid
    except OSError:
        uid = -1
    for name in _STREAMS:
        try:
            blocks = (directory / name).lstat().st_blocks
        except OSError:
            continue
        found.append(Log(blocks * _BLOCK, job, name, uid))
    return found


def shortened(logs: Iterable[Log], excess: int) -> dict[Log, int]:
    """Return the logs to shorten and their new sizes, so that `excess` bytes become free.

    Repeatedly halves the longest log of the user who keeps the most. Never removes the newest part
    of a log.
    """
    by_user: dict[int, list[tuple[int, Log]]] = {}
    for log in logs:
        by_user.setdefault(log.uid, []).append((-log.size, log))
    sums = {uid: -sum(size for size, _ in theirs) for uid, theirs in by_user.items()}
    for theirs in by_user.values():
        heapq.heapify(theirs)
    cut: dict[Log, int] = {}
    while excess > 0 and sums:
        uid = max(sums, key=lambda each: sums[each])
        size, log = -by_user[uid][0][0], by_user[uid][0][1]
        if size < 2 * LEAST_KEPT:
            # This is the user's longest log, so the user has nothing left to shorten.
            del sums[uid]
            continue
        cut[log] = size // 2
        heapq.heapreplace(by_user[uid], (-(size // 2), log))
        sums[uid] -= size - size // 2
        excess -= size - size // 2
    return cut


def _shorten_all(jobs: Path, logs: Iterable[Log], excess: int) -> list[JobId]:
    """Shorten logs until `excess` bytes are free, and return their jobs."""
    cut = []
    for log, keep in shortened(logs, excess).items():
        try:
            _shorten(jobs, log, keep)
        except OSError as error:
            _log.warning("cannot shorten the output of job %s: %s", log.job, error.strerror)
            continue
        if log.job not in cut:
            cut.append(log.job)
        _log.debug("shortened %s of job %s to %s", log.name, log.job, format_size(keep))
    return cut


def _shorten(jobs: Path, log: Log, keep: int) -> None:
    # By descriptor, without following links: users' shims write here, and the daemon may be root.
    directory = os.open(
        jobs / str(log.job), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    )
    try:
        shorten_log(directory, log.name, keep)
    finally:
        os.close(directory)


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
        """Remove output of ended jobs until the rest is within the limit (most_output)."""
        await asyncio.to_thread(self._limit_output)

    def _limit_output(self) -> None:
        with suppress(FileNotFoundError):  # the state directory is away for a while
            self._measure()
            most = self._settings().most_output
            if isinstance(most, Share):
                most = most.of(shutil.disk_usage(self._state.path).total)
            self._remove(each.job for each in over_limit(self._kept.values(), most))

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
            await asyncio.to_thread(self._remove, over)
            try:
                await self._in_writer(partial(self._retention.delete, over))
            except RecordUnwritable as error:
                _log.debug("%s; old jobs stay on record", error.message)
                return

    def _remove_output_before(self, border: datetime) -> None:
        with suppress(FileNotFoundError):
            self._measure()
            self._remove([each.job for each in self._kept.values() if each.ended_at < border])

    def _remove(self, jobs: Iterable[JobId]) -> None:
        for job in jobs:
            shutil.rmtree(self._state.job(job), ignore_errors=True)
            self._kept.pop(job, None)


def over_limit(kept: Iterable[KeptOutput], most: int) -> list[KeptOutput]:
    """Return the outputs to remove, in order, so that at most `most` bytes are left.

    The oldest output of the user who keeps the most is the first.
    """
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


_TAIL = 64 << 10
"""Bytes of each stream: a traceback of PyTorch or XLA has some tens of lines."""


class LogTail:
    """Reads the ends of jobs' logs, in a thread.

    The files are in a directory of the daemon, so their names do not come from the user. Their
    content does, and may be any bytes.
    """

    def __init__(self, directory_of: Callable[[JobId], Path]) -> None:
        self._directory_of = directory_of

    async def of(self, job: JobId) -> str:
        """Return the end of both streams; empty where they cannot be read."""
        directory = self._directory_of(job)
        return await asyncio.to_thread(
            lambda: "\n".join(_tail(directory / name) for name in _STREAMS)
        )


def _tail(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, _TAIL, max(0, size - _TAIL)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
