"""Whose process is whose: from a pid, as the driver gives it, to a person and to a job.

A process belongs to a job if it is in the job's scope, or else if it descends from the job's shim,
or else if its environment carries the job's marker, `GPULEASE_WORKER=<instance>/<job>`, and its
user is the job's: a marker is easily forged, a uid is not, and a scope is root's to give.

Which pids in the driver's lists have been given to somebody else since they came there.

What a GPU holds for a process that has died may stay, with its pid, for as long as a child that it
forked keeps its files open. The kernel gives that number away again, and whoever gets it holds
nothing of that memory.
"""

import asyncio
import os
import pwd
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import psutil

from gpulease.domain.gpu import JobId
from gpulease.host import cgroups
from gpulease.host.proc_reader import command_of, name_of, read, real_uid
from gpulease.shim import process_tree
from gpulease.shim.process_tree import Entry, deliver, entry, other_thread, processes

MARKER = "GPULEASE_WORKER"
_MARKER_START = MARKER.encode() + b"="
_CUT_OFF_AT = 15
"""Bytes; as long as the kernel keeps the name of a process, see proc_pid_comm(5)."""
_LARGEST_ENVIRONMENT = 8 << 20
_DEEPEST = 4096
_LOOK_AGAIN_S = 0.1
_MOST_REMEMBERED = 4096
_PLEASE = (signal.SIGTERM, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Who a process is."""

    pid: int
    user: str
    """The uid in digits where it has no name."""
    uid: int
    name: str
    command: tuple[str, ...]
    """Empty for a kernel thread, and for one that hides it."""
    started_at: datetime
    container: str | None
    """The short id of the container that it is in."""


class ProcessTable:
    """Look processes up; what cannot change in a process's life is read once."""

    def __init__(self) -> None:
        self._markers: dict[tuple[int, int], str] = {}
        """By pid and start time, so that a pid that is given anew is looked at anew."""

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Return who this is, or None if there is no such process (any more)."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                uid = process.uids().effective
                command = command_of(pid) or ()
                return ProcessIdentity(
                    pid,
                    _user_name(uid),
                    uid,
                    _full_name(name_of(pid) or "", command),
                    command,
                    datetime.fromtimestamp(process.create_time(), UTC),
                    cgroups.container_of(pid),
                )
        except psutil.Error:
            return None

    def in_scopes(self, pids: Iterable[int], jobs: Collection[JobId]) -> dict[int, JobId]:
        """Return the job of each of `pids` that is in the scope of one of `jobs`."""
        if not jobs:
            return {}
        found = {pid: cgroups.scope_of(pid) for pid in pids}
        return {pid: JobId(job) for pid, job in found.items() if job is not None and job in jobs}

    def jobs_of(
        self,
        pids: Iterable[int],
        roots: Mapping[int, JobId],
        marker_prefix: str,
        owners: Mapping[JobId, int] | None = None,
    ) -> dict[int, JobId]:
        """Return the job of each of `pids` that belongs to one.

        `roots` are the pids of living shims, `marker_prefix` is `<instance>/`, and `owners` the
        uids of jobs: a marker counts for a job only in a process of its owner.
        """
        seen: dict[int, Entry | None] = {}
        jobs: dict[int, JobId] = {}
        for pid in pids:
            job = _by_ancestry(pid, roots, seen)
            if job is None:
                job = self._by_marker(seen.get(pid), marker_prefix, owners)
            if job is not None:
                jobs[pid] = job
        return jobs

    def _by_marker(
        self, found: Entry | None, prefix: str, owners: Mapping[JobId, int] | None
    ) -> JobId | None:
        if found is None:
            return None
        marker = self._marker(found)
        if marker is None or not marker.startswith(prefix):
            return None
        number = marker.removeprefix(prefix)
        if not (number.isascii() and number.isdigit()):
            return None
        job = JobId(int(number))
        if owners is not None and owners.get(job) != real_uid(found.pid):
            return None
        return job

    def survivors(
        self,
        marker: str,
        owner: int | None = None,
        session: int | None = None,
        scope: JobId | None = None,
    ) -> list[int]:
        """Return the processes that a shim has left behind.

        They carry `marker` (`<instance>/<job>`), or are in the session that it led, whose number
        nobody else gets as long as it has members; and they are of `owner`, if given. Who is in
        the scope of the job `scope` is left behind whatever they carry, and whoever they are.
        """
        return [found.pid for found in self._survivors(marker, owner, session, scope)]

    async def end_survivors(
        self,
        marker: str,
        grace: timedelta,
        owner: int | None = None,
        session: int | None = None,
        scope: JobId | None = None,
    ) -> None:
        """Ask the survivors of a shim to go, and kill them after `grace`, until none is left."""
        await self.end(partial(self._survivors, marker, owner, session, scope), grace)

    async def end(self, look: Callable[[], set[Entry]], grace: timedelta) -> None:
        """Send SIGTERM to the processes that `look` finds, and SIGKILL after `grace`.

        Returns when `look` finds none.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace.total_seconds()
        asked: set[Entry] = set()
        while left := await asyncio.to_thread(look):
            killing = loop.time() >= deadline
            for found in left if killing else left - asked:
                deliver(found, *((signal.SIGKILL,) if killing else _PLEASE))
            asked |= left
            await asyncio.sleep(_LOOK_AGAIN_S)

    def of_job(
        self, job: JobId, marker: str, owner: int, shim: Entry | None, session: int | None
    ) -> set[Entry]:
        """Return the living processes of a job, without its shim, if its directory tells nothing.

        They are below `shim`, or they belong to `owner` and carry `marker` or are in `session`.
        A scope with the number of the job may belong to another daemon. It belongs to this job if
        one of these processes, or the shim, is in it.
        """
        found = self._survivors(marker, owner, session, None)
        if shim is not None:
            found.update(process_tree.descendants(shim.pid))
        known = {each.pid for each in found} | ({shim.pid} if shim is not None else set())
        enclosed = cgroups.members(job)
        if enclosed & known:
            entries = (entry(pid) for pid in enclosed - known)
            found.update(each for each in entries if each is not None and not each.zombie)
        return {each for each in found if shim is None or each.pid != shim.pid}

    def _survivors(
        self, marker: str, owner: int | None, session: int | None, scope: JobId | None
    ) -> set[Entry]:
        there = list(processes())
        enclosed = set() if scope is None else cgroups.members(scope)
        if any(found.pid == session and not found.zombie for found in there):
            # The shim is dead: this is somebody else's session, of the same number.
            session = None
        return {
            found
            for found in there
            if not found.zombie
            and found.pid != os.getpid()
            and (
                found.pid in enclosed
                # The user first: to read a marker takes the process's own leave, see `patience`.
                or (
                    owner in (None, real_uid(found.pid))
                    and (found.session == session or self._marker(found) == marker)
                )
            )
        }

    def _marker(self, found: Entry) -> str | None:
        """Return the marker in the environment that the process was started with.

        That there is none is not remembered: between fork and exec there is none yet.
        """
        key = (found.pid, found.started)
        marker = self._markers.get(key) or _read_marker(found.pid)
        if marker is not None:
            if len(self._markers) >= _MOST_REMEMBERED:
                self._markers.clear()
            self._markers[key] = marker
        return marker


def _by_ancestry(
    pid: int, roots: Mapping[int, JobId], seen: dict[int, Entry | None]
) -> JobId | None:
    """Go from parent to parent until one of `roots`; whoever was met is kept in `seen`."""
    for _ in range(_DEEPEST):
        if pid in roots:
            return roots[pid]
        if pid not in seen:
            seen[pid] = entry(pid)
        found = seen[pid]
        if found is None or found.parent == 0:
            return None
        pid = found.parent
    return None


def _read_marker(pid: int) -> str | None:
    for variable in environment_of(pid).split(b"\0"):
        if variable.startswith(_MARKER_START):
            return variable.removeprefix(_MARKER_START).decode("ascii", "replace")
    return None


def environment_of(pid: int) -> bytes:
    """Return the environment that a process was started with; empty where it cannot be read now."""
    found = read(pid, "environ", _LARGEST_ENVIRONMENT) or b""
    if found:
        return found
    # Where the main thread has ended the others still show what they all have.
    other = other_thread(pid)
    return b"" if other is None else read(pid, f"task/{other}/environ", _LARGEST_ENVIRONMENT) or b""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _full_name(name: str, command: Sequence[str]) -> str:
    """Return the name of a process, whole where its command tells what the kernel cut off."""
    program = os.path.basename(command[0]) if command else ""  # noqa: PTH119  not always a path
    return program if len(os.fsencode(name)) >= _CUT_OFF_AT and program.startswith(name) else name


class Listing:
    """Remembers, from one look at the GPUs to the next, who had each pid at first."""

    def __init__(self) -> None:
        self._first: dict[int, int | None] = {}
        """When each process started, in clock ticks since boot; None if there was none then."""

    def inherited(self, pids: Iterable[int]) -> frozenset[int]:
        """Take in what is listed now; return the pids that are not who they were at first.

        A pid that was not listed at the look before is a new one.
        """
        here: dict[int, int | None] = {}
        for pid in set(pids):
            found = entry(pid)
            here[pid] = None if found is None else found.started
        self._first = {pid: self._first.get(pid, started) for pid, started in here.items()}
        return frozenset(
            pid
            for pid, started in here.items()
            if started is not None and started != self._first[pid]
        )
