"""The process-finder port: whose a process is, among the jobs of this installation.

Which processes are servers of CUDA's MPS, on whose account the memory of other programs stands.

A program is such a server by its name, and only if it is root's process, or one that runs the file
of that name where nobody but root, or who asks, could have put it: else anybody could call a
program so, to have what it uses taken for that of the jobs beside it. The name alone says nothing:
in a mount namespace of one's own one may mount any program under any name (user_namespaces(7)), and
run it from outside through /proc/PID/root.
"""

import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.host import cgroups
from gpulease.host.process_watch import has_ended, living
from gpulease.host.processes import Listing, ProcessTable
from gpulease.service.ports import LivingProcess
from gpulease.shim import process_tree
from gpulease.shim.process_tree import entry, is_stopped

_NAME = "nvidia-cuda-mps-server"


def mps_servers(pids: Iterable[int]) -> frozenset[int]:
    """Return those of `pids` that are MPS servers, as far as this user may see."""
    return frozenset(pid for pid in pids if _is_server(pid))


def _is_server(pid: int) -> bool:
    link = Path(f"/proc/{pid}/exe")
    try:
        program = link.readlink()
        if program.name.removesuffix(" (deleted)") != _NAME or not _is_of_our_users(pid):
            return False
        # The path first: what belongs to others may lie on a file system that never answers.
        return _is_root(pid) or (_is_closed(program) and program.samefile(link))
    except OSError:
        return False


def _is_of_our_users(pid: int) -> bool:
    """Whether its users are ours, and not those of a namespace that anybody may make."""
    return Path(f"/proc/{pid}/ns/user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino


def _is_root(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
        if line.startswith(b"Uid:"):
            # Real, effective, saved and for files: a program that is setuid has them apart.
            return set(line.split()[1:]) == {b"0"}
    return False


def _is_closed(program: Path) -> bool:
    """Whether nobody but root and our user could put another file where `program` is."""
    for each in (*reversed(program.parents), program):
        found = each.lstat()
        if found.st_uid not in (0, os.geteuid()) or stat.S_ISLNK(found.st_mode):
            return False
        # In /tmp and the like others add what they please, and change nothing that is there.
        sticky = found.st_mode & stat.S_ISVTX and each != program.parent
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return False
    return True


_LONGEST_COMMAND = 4096


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Who a process is, for people."""

    user: str | None
    name: str | None
    command: str | None
    started_at: datetime | None = None
    container: str | None = None


def _readable(text: str) -> str:
    """Return text that any reader can take: names of processes are bytes, whatever they mean."""
    return os.fsencode(text).decode(errors="backslashreplace")


class Finder:
    """Looks processes up in the table, by the scopes, shims and markers of our own jobs."""

    def __init__(
        self,
        table: ProcessTable,
        installation: str,
        has_shim: Callable[[JobId], bool] = lambda _: True,
        has_scope: Callable[[JobId], bool] = lambda _: False,
        *,
        own_pids: bool = True,
    ) -> None:
        """`has_shim` tells whether the shim of a job lives: else its pid may be anybody's.

        `has_scope` tells whether we have put the job into a scope: else one of that name is that
        of another daemon on this machine. `own_pids` says that drivers count processes as they are
        counted here; else that has to show.
        """
        self._has_own_pids = own_pids
        self._believed = False
        self._missing: set[int] = set()
        """What was listed at the look before, and was not here."""
        self._has_scope = has_scope
        self._table = table
        self._has_shim = has_shim
        self._marker_prefix = f"{installation}/"
        self._listing = Listing()

    def identify(self, pid: int) -> JobIdentity | None:
        """Return who a process is, or None for one that is gone."""
        found = self._table.identify(pid)
        if found is None:
            return None
        command = shlex.join(found.command)[:_LONGEST_COMMAND]
        return JobIdentity(
            found.user,
            _readable(found.name),
            _readable(command) or None,
            found.started_at,
            found.container,
        )

    def mps_servers(self, pids: Iterable[int]) -> frozenset[int]:
        """Return those of `pids` that are servers of CUDA's MPS."""
        return mps_servers(pids)

    def inherited(self, pids: Iterable[int]) -> frozenset[int]:
        """Take in what the driver lists; return the pids that others had when it began to."""
        return self._listing.inherited(pids)

    def living(self, pid: int) -> LivingProcess | None:
        """Return the process that has this pid now, or None if there is none."""
        found = living(pid)
        return found and replace(found, name=_readable(found.name))

    def is_stopped(self, pid: int) -> bool:
        """Tell whether a signal has stopped the process with this pid, as Ctrl-Z does."""
        found = entry(pid)
        return found is not None and is_stopped(found)

    def count(self, job: Job) -> int | None:
        """Return how many processes a job has, in its scope or below its shim; reads all of /proc.

        Its shim is not counted. None: it has neither.
        """
        has_shim = job.shim_pid is not None and self._has_shim(job.id)
        enclosed = self._has_scope(job.id)
        if not has_shim and not enclosed:
            return None
        found = cgroups.members(job.id) if enclosed else set()
        if has_shim and job.shim_pid is not None:
            found |= {each.pid for each in process_tree.descendants(job.shim_pid)}
        return len(found - {job.shim_pid})

    def jobs_of(self, pids: Iterable[int], jobs: Sequence[Job]) -> Mapping[int, JobId]:
        """Return the job of each pid that belongs to one of `jobs`: by its scope first.

        Then by what it descends from, then by its marker. A process below the holder of a lease
        belongs to that lease, and among several leases of one holder to the one in whose
        environment it was started, or else to the latest. A holder that is itself in a job counts
        for nothing: its own job's lease is what holds for it, and for all below it.
        """
        pids = list(pids)
        shims = {
            job.shim_pid: job.id
            for job in jobs
            if job.shim_pid is not None and self._has_shim(job.id)
        }
        scopes = {job.id for job in jobs if self._has_scope(job.id)}
        holders = self._apart(_holders(jobs), shims, scopes)
        owners = {job.id: job.owner.uid for job in jobs}
        found = self._table.jobs_of(pids, {**shims, **holders}, self._marker_prefix, owners)
        held = {job.id: job.owner.uid for job in jobs if job.holder is not None}
        below = [pid for pid, job in found.items() if job in held]
        if below:
            found |= self._table.jobs_of(below, {}, self._marker_prefix, held)
        return {**found, **self._table.in_scopes(pids, scopes)}

    def knows_pids(self, pids: Iterable[int], found: Collection[int]) -> bool:
        """Tell whether pids that a driver lists are those that processes have here.

        In a pid namespace of its own a daemon may be told the pids of the host, or no process at
        all (nvidia-container-toolkit#1013); newer kernel modules translate them. That shows when
        one of `found`, those of jobs, is listed, and every other that is listed is here as well: a
        number alone may be the same by chance. It is believed until one is listed that is not here.
        """
        if self._has_own_pids:
            return True
        missing = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
        if missing & self._missing:
            # Once, it may have ended between the driver's list and our look; twice, it never was.
            self._believed = False
        elif found and not missing:
            self._believed = True
        self._missing = missing
        return self._believed

    def _apart(
        self, holders: Mapping[int, JobId], shims: Mapping[int, JobId], scopes: set[JobId]
    ) -> dict[int, JobId]:
        """Return those of `holders` that are in no job."""
        if not holders:
            return {}
        # A marker does not count here: the holder may have it from another lease.
        within = self._table.jobs_of(holders, shims, self._marker_prefix, {})
        within |= self._table.in_scopes(holders, scopes)
        return {pid: job for pid, job in holders.items() if pid not in within}


def _holders(jobs: Sequence[Job]) -> dict[int, JobId]:
    """Return the pids of those who hold a lease and are still there."""
    return {
        job.holder.process.pid: job.id
        for job in jobs
        if job.holder is not None
        and job.holder.process is not None
        and not has_ended(job.holder.process)
    }


def claims(jobs: Iterable[Job]) -> Mapping[int, frozenset[GpuUuid]]:
    """Return the GPUs that processes have leased while they ran, by pid: nothing else shows it."""
    found: dict[int, frozenset[GpuUuid]] = {}
    for job in jobs:
        process = job.holder and job.holder.process
        if process and job.holds_memory and not has_ended(process):
            gpus = frozenset(lease.gpu for lease in job.leases)
            found[process.pid] = found.get(process.pid, frozenset()) | gpus
    return found
