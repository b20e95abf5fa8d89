"""Keeps the state directory from growing for ever: old output goes, the record of the job stays."""

import asyncio
import shutil
from pathlib import Path

from gpulease.config import Settings
from gpulease.daemon.state import StateDirectory
from gpulease.domain.memory import JobId
from gpulease.service.ports import Clock, Store


async def tidy(state: StateDirectory, store: Store, settings: Settings, clock: Clock) -> None:
    """Remove the directories of jobs that ended longer ago than the settings keep them."""
    border = clock.now() - settings.keep_output_for

    def is_old(directory: Path) -> bool:
        job = store.job(JobId(int(directory.name))) if directory.name.isdecimal() else None
        return job is not None and job.ended_at is not None and job.ended_at < border

    def remove() -> None:
        for directory in state.jobs.iterdir():
            if is_old(directory):
                shutil.rmtree(directory, ignore_errors=True)

    await asyncio.to_thread(remove)
