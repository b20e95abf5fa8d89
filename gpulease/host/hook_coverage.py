"""Find processes of jobs that use a GPU without the framework hook, and notify the owners.

/proc shows how a process was started: its command, a few variables, and whether it is Python.
"""

import asyncio
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path

from gpulease.domain.enforcement import (
    HOOK,
    PATH,
    UNCOVERED,
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
from gpulease.shim.process_tree import program_of

_PYTHON = re.compile(r"python[0-9.]*[a-z]*( \(deleted\))?")
_LIBRARY = re.compile(rb"/libpython[0-9][^/\n]*\.so")


def started(pid: int) -> ProcessStart:
    """Return how a process was started."""
    environment, variables = read(pid, "environ"), None
    # An empty environment is not unreadable: `env -i` leaves one.
    if environment is not None:
        pairs = (os.fsdecode(each).partition("=") for each in environment.split(b"\0"))
        variables = {name: value for name, _, value in pairs if name in (HOOK, PATH)}
    command, container = command_of(pid) or ("",), cgroups.container_of(pid)
    return ProcessStart(command, variables, _is_python(pid), container)


def _is_python(pid: int) -> bool:
    """Return whether the program is Python, or has loaded Python's library."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False
    return bool(_PYTHON.fullmatch(program)) or bool(_LIBRARY.search(read(pid, "maps") or b""))


Tell = Callable[[JobId, str], Awaitable[None]]
"""Notifies the owner of a job."""

_LONGEST_COMMAND = 200


def on_record(store: Store, job: JobId) -> bool:
    """Return whether the owner of a job was notified, by this daemon or an earlier one."""
    return any(
        event.kind == "notice" and UNCOVERED in (event.detail or "") for event in store.events(job)
    )


class HookCoverage:
    """Checks each process once for each program that it runs, with one notice for each job."""

    def __init__(
        self,
        holding: Callable[[], Sequence[Job]],
        levels: Callable[[], Sequence[str]],
        hooks: Path,
        tell: Tell,
        was_told: Callable[[JobId], bool],
        note: Callable[[Job, UncoveredProcess], Awaitable[None]],
    ) -> None:
        """`levels` are the enforcement levels of all leases; `note` records each process."""
        self._note = note
        self._holding = holding
        self._levels = levels
        self._hooks = str(hooks)
        self._tell = tell
        self._was_told = was_told
        self._told: set[JobId] = set()
        self._checked: dict[tuple[int, Hashable], UncoveredProcess | None] = {}
        self._of: dict[JobId, tuple[UncoveredProcess, ...]] = {}

    def of(self, job: JobId) -> tuple[UncoveredProcess, ...]:
        """Return the processes of a job without the hook, as last observed."""
        return self._of.get(job, ())

    async def look(self, seen: Observation) -> None:
        """Check the processes on the GPUs, and notify owners at the first one without the hook."""
        # Held leases do not count: their holders may use the lease's environment or not.
        jobs = {job.id: job for job in self._holding() if job.holder is None}
        if EnforcementLevel.FRAMEWORK not in self._levels():
            jobs = {}
        programs = {
            pid: seen.programs[pid]
            for pid, job in seen.jobs_by_pid.items()
            if job in jobs and pid in seen.programs
        }
        found = await asyncio.to_thread(self._check, programs) if programs else {}
        of: dict[JobId, list[UncoveredProcess]] = defaultdict(list)
        for pid, uncovered in found.items():
            of[seen.jobs_by_pid[pid]].append(uncovered)
        self._of = {job: tuple(processes) for job, processes in of.items()}
        for job, processes in self._of.items():
            for each in processes:
                await self._note(jobs[job], each)
        self._told &= jobs.keys()
        for job in self._of.keys() - self._told:
            text = str(self._of[job][0])
            if not await asyncio.to_thread(self._was_told, job):
                await self._tell(job, text)
            self._told.add(job)

    def _check(self, programs: Mapping[int, Hashable]) -> dict[int, UncoveredProcess]:
        checked: dict[tuple[int, Hashable], UncoveredProcess | None] = {}
        for mark in programs.items():
            pid, program = mark
            found = self._checked[mark] if mark in self._checked else self._check_one(pid)
            # What was read just now is of this program, unless it has ended meanwhile.
            if mark in self._checked or program_of(pid) == program:
                checked[mark] = found
        self._checked = checked
        return {pid: uncovered for (pid, _), uncovered in checked.items() if uncovered is not None}

    def _check_one(self, pid: int) -> UncoveredProcess | None:
        start = started(pid)
        why = why_uncovered(start, self._hooks)
        if why is None:
            return None
        command = os.fsencode(shlex.join(start.command)).decode(errors="backslashreplace")
        return UncoveredProcess(pid, command[:_LONGEST_COMMAND], why)
