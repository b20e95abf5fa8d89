"""Notices processes of jobs that use a GPU and are not held by the framework hook.

How a process was started, as /proc tells: its command, a few variables, and if it is Python.
"""

import asyncio
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpulease.domain.enforcement import (
    HOOK,
    PATH,
    SAID,
    EnforcementLevel,
    ProcessStart,
    UncoveredProcess,
    why_uncovered,
)
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.host import cgroups
from gpulease.host.proc_reader import command_of, read
from gpulease.service.observation import Observation
from gpulease.service.ports import Store

_PYTHON = re.compile(r"python[0-9.]*[a-z]*( \(deleted\))?")
_LIBRARY = re.compile(rb"/libpython[0-9][^/\n]*\.so")


class ExecInfo(NamedTuple):
    """What was found out."""

    command: tuple[str, ...]
    variables: dict[str, str] | None
    """Of those asked for, those that it was given; None where they cannot be read."""
    is_python: bool


def exec_mark(pid: int) -> bytes:
    """Return what is another after each exec, and the same as long as a program runs.

    The auxiliary vector: addresses that the kernel draws anew; see gpu/simulated.py.
    """
    return read(pid, "auxv") or b""


def started(pid: int, names: Collection[str]) -> ExecInfo:
    """Return how a process was started, with its variables of these names."""
    environment = read(pid, "environ")
    return ExecInfo(
        command_of(pid) or ("",),
        # One that is empty was read all the same: that is what env -i leaves.
        None if environment is None else _chosen(environment, names),
        _is_python(pid),
    )


def _chosen(environment: bytes, names: Collection[str]) -> dict[str, str]:
    pairs = (os.fsdecode(each).partition("=") for each in environment.split(b"\0"))
    return {name: value for name, _, value in pairs if name in names}


def _is_python(pid: int) -> bool:
    """Tell by the program, or by the library of one that has Python built in."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False
    return bool(_PYTHON.fullmatch(program)) or bool(_LIBRARY.search(read(pid, "maps") or b""))


Tell = Callable[[JobId, str], Awaitable[None]]
"""Tells the owner of a job something."""

_LONGEST_COMMAND = 200


def on_record(store: Store, job: JobId) -> bool:
    """Tell whether the owner of a job has been told, by this daemon or one before it."""
    return any(
        event.kind == "notice" and SAID in (event.detail or "") for event in store.events(job)
    )


class HookCoverage:
    """Judges each process once for each program that it runs; one notice for each job."""

    def __init__(
        self,
        live: Callable[[], Sequence[Job]],
        rungs: Callable[[], Sequence[str]],
        hooks: Path,
        tell: Tell,
        was_told: Callable[[JobId], bool],
    ) -> None:
        """`rungs` are those on which leases stand here; `was_told`, also before a restart."""
        self._live = live
        self._rungs = rungs
        self._hooks = str(hooks)
        self._tell = tell
        self._was_told = was_told
        self._told: set[JobId] = set()
        self._judged: dict[tuple[int, bytes], UncoveredProcess | None] = {}
        self._of: dict[JobId, tuple[UncoveredProcess, ...]] = {}

    def of(self, job: JobId) -> tuple[UncoveredProcess, ...]:
        """Return the processes of a job that the latest look showed, and that are not held."""
        return self._of.get(job, ())

    async def look(self, seen: Observation) -> None:
        """Judge who is on the GPUs, and tell the owners whose job is first seen to be unheld."""
        # Whoever holds a lease without a job may have taken its environment, or not.
        jobs = {job.id for job in self._live() if job.holds_memory and job.holder is None}
        if EnforcementLevel.FRAMEWORK not in self._rungs():
            jobs = set()
        pids = [pid for pid, job in seen.jobs_by_pid.items() if job in jobs]
        found = await asyncio.to_thread(self._judge, pids) if pids else {}
        of: dict[JobId, list[UncoveredProcess]] = defaultdict(list)
        for pid, unheld in found.items():
            of[seen.jobs_by_pid[pid]].append(unheld)
        self._of = {job: tuple(processes) for job, processes in of.items()}
        self._told &= jobs
        for job in self._of.keys() - self._told:
            text = str(self._of[job][0])
            if not await asyncio.to_thread(self._was_told, job):
                await self._tell(job, text)
            self._told.add(job)

    def _judge(self, pids: Iterable[int]) -> dict[int, UncoveredProcess]:
        judged: dict[tuple[int, bytes], UncoveredProcess | None] = {}
        for pid in pids:
            mark = pid, exec_mark(pid)
            if mark[1]:
                judged[mark] = self._judged[mark] if mark in self._judged else self._one(pid)
        self._judged = judged
        return {pid: unheld for (pid, _), unheld in judged.items() if unheld is not None}

    def _one(self, pid: int) -> UncoveredProcess | None:
        start = started(pid, (HOOK, PATH))
        why = why_uncovered(
            ProcessStart(
                start.command, start.variables, start.is_python, cgroups.container_of(pid)
            ),
            self._hooks,
        )
        if why is None:
            return None
        command = os.fsencode(shlex.join(start.command)).decode(errors="backslashreplace")
        return UncoveredProcess(pid, command[:_LONGEST_COMMAND], why)
