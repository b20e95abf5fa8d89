"""Keeps the state directory from growing for ever: old output goes first, at last the record."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from gpulease.config import Settings
from gpulease.daemon.state import StateDirectory
from gpulease.domain.memory import JobId
from gpulease.errors import RecordUnwritable
from gpulease.service.ports import Clock, InThread
from gpulease.store.pruning import Pruning
from gpulease.store.repository import SqlStore
from gpulease.units import Share

_log = logging.getLogger("gpuleased")

_BLOCK = 512
"""Bytes that st_blocks counts in, whatever the file system; holes are not counted."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The output of one ended job."""

    job: JobId
    uid: int
    size: int
    """Bytes on disk."""


class Tidier:
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
        self._pruning = Pruning(store)
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
