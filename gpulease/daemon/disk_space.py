"""Free space on the disk of the record: what jobs write must not take the last of it.

Needs no database, because without space the database cannot be opened. The shims themselves stop
their logs from taking the last space; here is what no single shim can see: the sum of all logs,
logs of shims that are gone, and space that others than jobs take.
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
"""Bytes that st_blocks counts in, whatever the file system; holes are not counted."""
_LARGEST_PART = 10
"""Of a disk so small that `keep_free` is more than one part in so many, that part is kept free."""
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
    """Of the job's owner."""


def kept_free(settings: Settings) -> int:
    """Return how many bytes of the disk are kept free.

    Raises:
        OSError: the disk does not tell its size.
    """
    return min(settings.keep_free, shutil.disk_usage(settings.state).total // _LARGEST_PART)


class DiskSpace:
    """Shortens logs where they take too much space, and lays the record's reserve again."""

    def __init__(self, store: SqlStore, settings: Callable[[], Settings], notify: Notify) -> None:
        """`notify` tells the owner of a job something."""
        self._store = store
        self._settings = settings
        self._notify = notify
        self._notified: set[JobId] = set()
        self._complaints = LogOnce(_log)

    async def bound_running(self) -> None:
        """Shorten logs of running jobs until their sum is within its bound."""
        running = [job.id for job in self._store.live() if job.holds_memory]
        self._notified &= set(running)
        cut = await self._looked(lambda: self._bound(running))
        await self._tell(cut, "running jobs keep as much output as they may (most_running_output)")

    async def keep_free(self) -> None:
        """Shorten logs of any job until the disk has space again, and lay the reserve."""
        cut = await self._looked(self._keep_free)
        running = {job.id for job in self._store.live() if job.holds_memory}
        await self._tell([job for job in cut if job in running], "the disk is nearly full")

    async def _looked(self, look: Callable[[], list[JobId]]) -> list[JobId]:
        """Return what `look` returns; a state directory that cannot be read is logged once."""
        try:
            cut = await asyncio.to_thread(look)
        except OSError as error:
            text = f"cannot look after the disk space of {self._settings().state}: {error.strerror}"
            self._complaints.say("space", f"{text}; trying again")
            return []
        self._complaints.passed("space")
        return cut

    def _bound(self, running: Iterable[JobId]) -> list[JobId]:
        settings = self._settings()
        jobs = settings.state / JOBS
        most = settings.most_running_output
        if isinstance(most, Share):
            most = most.of(shutil.disk_usage(settings.state).total)
        logs = [log for job in running for log in _logs_of(jobs, job)]
        return _shorten_all(jobs, logs, sum(log.size for log in logs) - most)

    def _keep_free(self) -> list[JobId]:
        cut = free_space(self._settings(), self._store.reserve.missing)
        self._store.reserve.lay(kept_free(self._settings()))
        return cut

    async def _tell(self, cut: Iterable[JobId], why: str) -> None:
        for job in set(cut) - self._notified:
            # Once: a job that goes on writing loses its oldest part every few seconds.
            self._notified.add(job)
            try:
                await self._notify(job, _NOTICE.format(why))
            except RecordUnwritable as error:
                _log.warning("%s; job %s is not told: %s", error.message, job, why)


def free_space(settings: Settings, reserve: int) -> list[JobId]:
    """Shorten the logs of all jobs if the disk has too little space; return those jobs.

    Called before the database is opened as well. `reserve`: bytes that are wanted besides.

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
    """Return the logs of a job. Whose it is, its socket tells, which its shim gave to the owner."""
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
    """Return which logs are to be shortened to how much, so that `excess` bytes come free.

    The longest log of the user who keeps the most is halved, again and again: a user who floods
    the disk loses their own output. The newest part of each log is never removed.
    """
    by_user: dict[int, list[tuple[int, Log]]] = {}
    for log in logs:
        by_user.setdefault(log.uid, []).append((-log.size, log))
    sums = {uid: -sum(size for size, _ in theirs) for uid, theirs in by_user.items()}
    for theirs in by_user.values():
        heapq.heapify(theirs)
    going: dict[Log, int] = {}
    while excess > 0 and sums:
        uid = max(sums, key=lambda each: sums[each])
        size, log = -by_user[uid][0][0], by_user[uid][0][1]
        if size < 2 * LEAST_KEPT:
            # The longest of theirs: nothing of this user's is left to be shortened.
            del sums[uid]
            continue
        going[log] = size // 2
        heapq.heapreplace(by_user[uid], (-(size // 2), log))
        sums[uid] -= size - size // 2
        excess -= size - size // 2
    return going


def _shorten_all(jobs: Path, logs: Iterable[Log], excess: int) -> list[JobId]:
    """Shorten logs until `excess` bytes are free, and return the jobs they are of."""
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
    # By descriptors, following no link: root may do this for files that users' shims write.
    directory = os.open(
        jobs / str(log.job), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    )
    try:
        shorten_log(directory, log.name, keep)
    finally:
        os.close(directory)
