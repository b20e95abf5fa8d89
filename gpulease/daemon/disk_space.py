"""Keeps space free on the disk of the database by shortening the output of jobs.

Needs no database, which cannot be opened without free space. Each shim limits the logs of its own
job. This module handles what no single shim can see: the sum of all logs, logs without a shim, and
space that other programs take.
"""

import asyncio
import heapq
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpulease.config import Settings
from gpulease.domain.gpu import JobId
from gpulease.errors import RecordUnwritable
from gpulease.host.state_dir import JOBS
from gpulease.service.log_once import LogOnce
from gpulease.shim.output import LEAST_KEPT, shorten_log
from gpulease.store.store import SqlStore
from gpulease.units import Share, format_size

_log = logging.getLogger(__name__)

_BLOCK = 512
"""The unit of st_blocks in bytes, on every file system; holes are not counted."""
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
        running = [job.id for job in self._store.live() if job.holds_memory]
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
        running = {job.id for job in self._store.live() if job.holds_memory}
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
    for name in ("stdout", "stderr"):
        try:
            blocks = (directory / name).lstat().st_blocks
        except OSError:
            continue
        found.append(Log(blocks * _BLOCK, job, name, uid))
    return found


def shortened(logs: Iterable[Log], excess: int) -> dict[Log, int]:
    """Return the logs to shorten and their new sizes, so that `excess` bytes become free.

    Repeatedly halves the longest log of the user who keeps the most, so that users who fill the
    disk lose their own output. Never removes the newest part of a log.
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
