"""Find the user and the job of a process, given a pid from the driver.

A process belongs to a job if it is in the job's scope; otherwise if it descends from the job's
shim; otherwise if its environment has the job's marker, `GPULEASE_WORKER=<instance>/<job>`, and its
user is the job's or root has put it into a container. A marker is easily forged, but a uid is not,
and only root assigns scopes. The uid in a container says nothing about its user, but an engine that
runs as root starts containers only for users that could become root anyway.

`PidReuse` finds pids in the driver's lists that other processes have by now. When a process dies,
its GPU memory stays allocated under its pid while a child keeps the files open. Meanwhile the
kernel may give the pid to a process that has none of that memory.
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
"""Bytes of a process's name that the kernel keeps, see proc_pid_comm(5)."""
_LARGEST_ENVIRONMENT = 8 << 20
_DEEPEST = 4096
_LOOK_AGAIN_S = 0.1
_MOST_REMEMBERED = 4096
_ASK_TO_END = (signal.SIGTERM, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The user, name and command of a process."""

    pid: int
    user: str
    """The uid in digits if it has no name."""
    uid: int
    name: str
    command: tuple[str, ...]
    """Empty for a kernel thread and for a process that hides it."""
    started_at: datetime
    container: str | None
    """The short id of its container."""


class ProcessTable:
    """Looks up processes. What cannot change while a process lives is read once."""

    def __init__(self) -> None:
        self._markers: dict[tuple[int, int], str] = {}
        """By pid and start time, since pids are reused."""

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process, or None if it does not exist."""
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

        `roots` are the pids of living shims, `marker_prefix` is `<instance>/`, and `owners` are the
        uids of jobs: a marker counts only in a process of the job's owner, or in a container.
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
        return job if owners is None or _may_mark(found.pid, owners.get(job)) else None

    def in_containers(self, marker: str, owner: int) -> set[Entry]:
        """Return the processes with `marker` (`<instance>/<job>`) that are in containers."""
        return {
            found
            for found in processes()
            if not found.zombie
            and cgroups.container_of(found.pid) is not None
            and _may_mark(found.pid, owner)
            and self._marker(found) == marker
        }

    def survivors(
        self,
        marker: str,
        owner: int | None = None,
        session: int | None = None,
        scope: JobId | None = None,
    ) -> set[Entry]:
        """Return the processes that a dead shim has left behind.

        They have `marker` (`<instance>/<job>`) or are in `session`, which the shim led and whose id
        is not reused while it has members; and they belong to `owner`, if given. Processes in the
        scope of the job `scope` are included in any case.
        """
        there = list(processes())
        in_scope = set() if scope is None else cgroups.members(scope)
        if any(found.pid == session and not found.zombie for found in there):
            # The shim is dead, so this is another session with the same id.
            session = None
        return {
            found
            for found in there
            if not found.zombie
            and found.pid != os.getpid()
            and (
                found.pid in in_scope
                # The user first: a process can block the read of its marker, see `proc_reader`.
                or (
                    owner in (None, real_uid(found.pid))
                    and (found.session == session or self._marker(found) == marker)
                )
            )
        }

    async def end_survivors(
        self,
        marker: str,
        grace: timedelta,
        owner: int | None = None,
        session: int | None = None,
        scope: JobId | None = None,
    ) -> None:
        """Send SIGTERM to the survivors of a shim, and SIGKILL after `grace`; return at the end."""
        await self.end(partial(self.survivors, marker, owner, session, scope), grace)

    async def end(self, look: Callable[[], set[Entry]], grace: timedelta) -> None:
        """Send SIGTERM to the processes that `look` finds, and SIGKILL after `grace`.

        Return when `look` finds none.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace.total_seconds()
        asked: set[Entry] = set()
        while left := await asyncio.to_thread(look):
            killing = loop.time() >= deadline
            for found in left if killing else left - asked:
                deliver(found, *((signal.SIGKILL,) if killing else _ASK_TO_END))
            asked |= left
            await asyncio.sleep(_LOOK_AGAIN_S)

    def of_job(
        self, job: JobId, marker: str, owner: int, shim: Entry | None, session: int | None
    ) -> set[Entry]:
        """Return the living processes of a job without a directory, except its shim.

        They are below `shim`, or belong to `owner` and have `marker` or are in `session`. A scope
        with the job's number may belong to another daemon. It counts if one of these processes or
        the shim is in it.
        """
        found = self.survivors(marker, owner, session, None)
        if shim is not None:
            found.update(process_tree.descendants(shim.pid))
        known = {each.pid for each in found} | ({shim.pid} if shim is not None else set())
        in_scope = cgroups.members(job)
        if in_scope & known:
            entries = (entry(pid) for pid in in_scope - known)
            found.update(each for each in entries if each is not None and not each.zombie)
        return {each for each in found if shim is None or each.pid != shim.pid}

    def _marker(self, found: Entry) -> str | None:
        """Return the marker in the environment of a process.

        A missing marker is not remembered: between fork and exec it is not there yet.
        """
        key = (found.pid, found.started)
        marker = self._markers.get(key) or _read_marker(found.pid)
        if marker is not None:
            if len(self._markers) >= _MOST_REMEMBERED:
                self._markers.clear()
            self._markers[key] = marker
        return marker


def _may_mark(pid: int, owner: int | None) -> bool:
    """Return whether the marker of a job of the user `owner` counts in a process."""
    return owner is not None and (owner == real_uid(pid) or cgroups.in_container_of_root(pid))


def _by_ancestry(
    pid: int, roots: Mapping[int, JobId], seen: dict[int, Entry | None]
) -> JobId | None:
    """Go from parent to parent until one of `roots`, and add the processes to `seen`."""
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
    """Return the environment that a process was started with; empty if unreadable."""
    found = read(pid, "environ", _LARGEST_ENVIRONMENT) or b""
    if found:
        return found
    # If the main thread has ended, another thread still shows the environment.
    other = other_thread(pid)
    return b"" if other is None else read(pid, f"task/{other}/environ", _LARGEST_ENVIRONMENT) or b""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _full_name(name: str, command: Sequence[str]) -> str:
    """Return the name of a process, completed from its command if the kernel cut it off."""
    program = os.path.basename(command[0]) if command else ""  # noqa: PTH119  not always a path
    return program if len(os.fsencode(name)) >= _CUT_OFF_AT and program.startswith(name) else name


class PidReuse:
    """Remembers which process had each listed pid at first."""

    def __init__(self) -> None:
        self._first: dict[int, int | None] = {}
        """The start of each process, in clock ticks since boot; None if there was no process."""

    def reused(self, pids: Iterable[int]) -> frozenset[int]:
        """Note the pids that are listed now; return those that another process has by now.

        A pid that was not listed the last time counts as new.
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
