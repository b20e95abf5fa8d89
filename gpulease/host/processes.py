"""Find the user and the job of a process, given a pid from the driver.

A process belongs to a job if it is in the job's scope; otherwise if it descends from the job's
shim; otherwise if its environment has the job's marker, `GPULEASE_WORKER=<instance>/<job>/<mac>`,
and its user is the job's or root has put it into a container. A uid cannot be forged, and only root
assigns scopes. The uid in a container says nothing about its user, so there the marker counts by
its message authentication code, which no other user can compute. Jobs from before an upgrade may
have a marker without one; it counts only in processes of the job's owner.

`PidReuse` finds pids in the driver's lists that other processes have by now. When a process dies,
its GPU memory stays allocated under its pid while a child keeps the files open. Meanwhile the
kernel may give the pid to a process that has none of that memory.
"""

import asyncio
import hmac
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from functools import partial

from gpulease.domain.gpu import JobId
from gpulease.host import cgroups
from gpulease.host.proc_reader import read, real_uid
from gpulease.shim import process_tree
from gpulease.shim.process_tree import Entry, deliver, entry, other_thread, processes

Seen = dict[int, tuple[Entry, bytes] | None]
"""What was read of processes at one moment, by pid, see `process_tree.entry_and_program`."""

MARKER = "GPULEASE_WORKER"
_MARKER_START = MARKER.encode() + b"="
_LARGEST_ENVIRONMENT = 8 << 20
_DEEPEST = 4096
_MOST_DIGITS = 19
_LOOK_AGAIN_S = 0.1
_MOST_REMEMBERED = 4096
_ASK_TO_END = (signal.SIGTERM, signal.SIGCONT)


def marker(installation: str, job: JobId, secret: str) -> str:
    """Return the value that marks the processes of a job; `secret` is what only the daemon has."""
    name = f"{installation}/{job}"
    return f"{name}/{hmac.new(secret.encode(), name.encode(), 'sha256').hexdigest()}"


def _unsigned(mark: str | None) -> str | None:
    """Return `<instance>/<job>` of a marker."""
    return None if mark is None else "/".join(mark.split("/")[:2])


class ProcessTable:
    """Looks up processes. What cannot change while a process lives is read once."""

    def __init__(self, secret: str = "") -> None:
        """`secret` is that of the markers of jobs."""
        self._secret = secret
        self.containers = cgroups.ContainerProcesses()
        self._markers: dict[tuple[int, int], str] = {}
        """By pid and start time, since pids are reused."""

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
        seen: Seen | None = None,
    ) -> dict[int, JobId]:
        """Return the job of each of `pids` that belongs to one.

        `roots` are the pids of living shims, `marker_prefix` is `<instance>/`, and `owners` are the
        uids of jobs: a marker counts only in a process of the job's owner, or, with its code, in a
        container. The processes in `seen` are not read again, and those that are read are added.
        """
        seen = {} if seen is None else seen
        jobs: dict[int, JobId] = {}
        for pid in pids:
            job = _by_ancestry(pid, roots, seen)
            if job is None and (found := seen.get(pid)) is not None:
                job = self._by_marker(found[0], marker_prefix, owners)
            if job is not None:
                jobs[pid] = job
        return jobs

    def _by_marker(
        self, found: Entry, prefix: str, owners: Mapping[JobId, int] | None
    ) -> JobId | None:
        mark = self._marker(found)
        if mark is None or not mark.startswith(prefix):
            return None
        number = mark.removeprefix(prefix).partition("/")[0]
        if not (number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS):
            return None
        job = JobId(int(number))
        if owners is None:
            return job
        is_signed = hmac.compare_digest(
            mark.encode(), marker(prefix.rstrip("/"), job, self._secret).encode()
        )
        return job if _may_mark(found.pid, owners.get(job), is_signed=is_signed) else None

    def in_containers(self, mark: str, owner: int) -> set[Entry]:
        """Return the processes with the marker `mark` that are in containers."""
        there = (entry(pid) for pid in self.containers.look())
        return {
            found
            for found in there
            if found is not None
            and not found.zombie
            and _may_mark(found.pid, owner, is_signed=True)
            and self._marker(found) == mark
        }

    def survivors(
        self,
        mark: str,
        owner: int | None = None,
        session: int | None = None,
        scope: JobId | None = None,
        among: Collection[Entry] | None = None,
    ) -> set[Entry]:
        """Return the processes that a dead shim has left behind.

        They have the marker `mark`, with or without its code, or are in `session`, which the shim
        led and whose id is not reused while it has members; and they belong to `owner`, if given.
        Processes in the scope of the job `scope` are included in any case. `among` are all that
        there are, if they are known.
        """
        there = list(processes()) if among is None else among
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
                    and (
                        found.session == session
                        or _unsigned(self._marker(found)) == _unsigned(mark)
                    )
                )
            )
        }

    async def end_survivors(
        self,
        mark: str,
        grace: timedelta,
        owner: int | None = None,
        session: int | None = None,
        scope: JobId | None = None,
    ) -> None:
        """Send SIGTERM to the survivors of a shim, and SIGKILL after `grace`; return at the end."""
        await self.end(partial(self.survivors, mark, owner, session, scope), grace)

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
        self, job: JobId, mark: str, owner: int, shim: Entry | None, session: int | None
    ) -> set[Entry]:
        """Return the living processes of a job without a directory, except its shim.

        They are below `shim`, or belong to `owner` and have the marker `mark` or are in `session`.
        A scope with the job's number may belong to another daemon. It counts if one of these
        processes or the shim is in it.
        """
        found = self.survivors(mark, owner, session, None)
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
        mark = self._markers.get(key) or _read_marker(found.pid)
        if mark is not None:
            if len(self._markers) >= _MOST_REMEMBERED:
                self._markers.clear()
            self._markers[key] = mark
        return mark


def _may_mark(pid: int, owner: int | None, *, is_signed: bool) -> bool:
    """Return whether the marker of a job of the user `owner` counts in a process."""
    if owner is None:
        return False
    return owner == real_uid(pid) or (is_signed and cgroups.in_container_of_root(pid))


def _by_ancestry(pid: int, roots: Mapping[int, JobId], seen: Seen) -> JobId | None:
    """Go from parent to parent until one of `roots`, and add the processes to `seen`."""
    for _ in range(_DEEPEST):
        if pid in roots:
            return roots[pid]
        if pid not in seen:
            seen[pid] = process_tree.entry_and_program(pid)
        found = seen[pid]
        if found is None or found[0].parent == 0:
            return None
        pid = found[0].parent
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


class PidReuse:
    """Remembers which process had each listed pid at first."""

    def __init__(self) -> None:
        self._first: dict[int, int | None] = {}
        """The start of each process, in clock ticks since boot; None if there was no process."""

    def reused(self, here: Mapping[int, int | None]) -> frozenset[int]:
        """Note the pids that are listed now; return those that another process has by now.

        `here` are the starts of the processes that have them, as `_first`. A pid that was not
        listed the last time counts as new.
        """
        self._first = {pid: self._first.get(pid, started) for pid, started in here.items()}
        return frozenset(
            pid
            for pid, started in here.items()
            if started is not None and started != self._first[pid]
        )
