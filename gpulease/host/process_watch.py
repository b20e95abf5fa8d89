"""Processes that gpulease did not start: which one has a pid now, and when it ends.

A process is identified by descriptor and start time, since its pid may be reused at any moment,
also while no daemon runs (pidfd_open(2)).
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import EINVAL, ENOENT, ESRCH
from functools import cache
from pathlib import Path

import psutil

from gpulease.domain.job import Process
from gpulease.host.proc_reader import name_of
from gpulease.service.ports import LivingProcess
from gpulease.shim.process_tree import entry

_NO_SUCH_PROCESS = (ESRCH, EINVAL, ENOENT)
"""The last two are for the pid of a thread, in older and newer kernels."""


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def run_of_system() -> str:
    """Return an id that changes with each boot, and in a container with each of its starts.

    It consists of the kernel's boot id and the start time of process 1.
    """
    first = entry(1)
    return boot_id() if first is None else f"{boot_id()}/{first.started}"


def living(pid: int) -> LivingProcess | None:
    """Return the process that has `pid` now; None if there is none, or it is a thread."""
    found = entry(pid) if pid > 0 else None
    if found is None:
        return None
    process = Process(pid, found.started, boot_id())
    try:
        seen = psutil.Process(pid)
        uid, name = seen.uids().real, name_of(pid) or ""
    except psutil.Error:
        return None
    # What was read belongs to this process only if the pid was not reused meanwhile.
    descriptor = _descriptor(process)
    if descriptor is None:
        return None
    os.close(descriptor)
    return LivingProcess(process, uid, name)


def has_ended(process: Process) -> bool:
    """Return whether exactly this process has ended."""
    descriptor = _descriptor(process)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


class ProcessWatch:
    """Waits for the ends of processes, with one descriptor for each process."""

    def __init__(self) -> None:
        self._watched: dict[Process, _Watched] = {}

    @asynccontextmanager
    async def of(self, process: Process) -> AsyncIterator[asyncio.Event]:
        """Return an event that is set once exactly this process has ended."""
        watched = self._watched.get(process)
        if watched is None:
            watched = self._watched[process] = _Watched(process)
        watched.waiting += 1
        try:
            yield watched.ended
        finally:
            watched.waiting -= 1
            if not watched.waiting:
                del self._watched[process]
                watched.close()


class _Watched:
    """One watched process."""

    def __init__(self, process: Process) -> None:
        self.ended = asyncio.Event()
        self.waiting = 0
        self._descriptor = _descriptor(process)
        if self._descriptor is None:
            self.ended.set()
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, self._note)

    def _note(self) -> None:
        self.close()
        self.ended.set()

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def _descriptor(process: Process) -> int | None:
    """Return a descriptor of exactly this process, or None if it has ended.

    Raises:
        OSError: this cannot be determined, for example because no descriptor is free.
    """
    if process.boot != boot_id():
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in _NO_SUCH_PROCESS:
            return None
        raise
    now = entry(process.pid)
    if now is None or now.zombie or now.started != process.started:
        os.close(descriptor)
        return None
    return descriptor
