"""The process-finder port: the job of a process, its end, and which processes are MPS servers.

A process that gpulease did not start is identified by descriptor and start time, since its pid may
be reused at any moment, also while no daemon runs (pidfd_open(2)).

The driver charges an MPS server with the memory of its clients. A process counts as an MPS server
by the name of its program, and only if root runs it, or if nobody but root and this user could have
put the program there. Otherwise users could name any program like that, and its memory would count
as that of other jobs. A path proves nothing: in a mount namespace a user can mount any program
under any name (user_namespaces(7)) and run it from outside through /proc/PID/root.
"""

import asyncio
import os
import shlex
import stat
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from errno import EINVAL, ENOENT, ESRCH
from functools import cache
from pathlib import Path

import psutil

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job, Process
from gpulease.host import cgroups
from gpulease.host.proc_reader import command_of, name_of, real_uid, uids_of
from gpulease.host.processes import PidReuse, ProcessTable, Seen
from gpulease.peer_credentials import user_name
from gpulease.service.ports import ListedProcesses, LivingProcess, ProcessIdentity
from gpulease.shim import process_tree
from gpulease.shim.process_tree import entry, entry_and_program, is_stopped
from gpulease.slurm.node.processes import SlurmProcesses

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
    uid, name = real_uid(pid), name_of(pid)
    # What was read belongs to this process only if the pid was not reused meanwhile.
    descriptor = _descriptor(process)
    if uid is None or descriptor is None:
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


_NAME = "nvidia-cuda-mps-server"


def _server_program(pid: int) -> Path | None:
    """Return the program of a process if it has the name of an MPS server."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return None
    return program if program.name.removesuffix(" (deleted)") == _NAME else None


def _is_server(pid: int, program: Path) -> bool:
    try:
        if not _is_in_our_user_namespace(pid):
            return False
        # The path first: a file of another user may be on a file system that does not answer.
        return set(uids_of(pid)) == {0} or (
            _is_closed(program) and program.samefile(f"/proc/{pid}/exe")
        )
    except OSError:
        return False


def _is_in_our_user_namespace(pid: int) -> bool:
    """Return whether a process is in our user namespace; anybody can create another one."""
    return Path(f"/proc/{pid}/ns/user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino


def _is_closed(program: Path) -> bool:
    """Return whether only root and this user can replace the file `program`."""
    for each in (*reversed(program.parents), program):
        found = each.lstat()
        if found.st_uid not in (0, os.geteuid()) or stat.S_ISLNK(found.st_mode):
            return False
        # In sticky directories such as /tmp others can add files but not replace them.
        sticky = found.st_mode & stat.S_ISVTX and each != program.parent
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return False
    return True


_LONGEST_COMMAND = 4096
_CUT_OFF_AT = 15
"""Bytes of a process's name that the kernel keeps, see proc_pid_comm(5)."""


def _full_name(name: str, command: Sequence[str]) -> str:
    """Return the name of a process, completed from its command if the kernel cut it off."""
    program = os.path.basename(command[0]) if command else ""  # noqa: PTH119  not always a path
    return program if len(os.fsencode(name)) >= _CUT_OFF_AT and program.startswith(name) else name


def _readable(text: str) -> str:
    """Return printable text: names of processes are arbitrary bytes."""
    return os.fsencode(text).decode(errors="backslashreplace")


class Finder:
    """Finds processes of this installation's jobs, by scope, shim and marker."""

    def __init__(
        self,
        table: ProcessTable,
        installation: str,
        has_shim: Callable[[JobId], bool] = lambda _: True,
        has_scope: Callable[[JobId], bool] = lambda _: False,
        *,
        own_pids: bool = True,
    ) -> None:
        """`has_shim` says whether the shim of a job lives; otherwise its pid may be reused.

        `has_scope` says whether this daemon put the job into a scope; otherwise a scope of this
        name belongs to another daemon. `own_pids` says that the driver's pids are those of this pid
        namespace; otherwise `knows_pids` finds out.
        """
        self._has_own_pids = own_pids
        self._pids_are_ours = False
        self._missing: set[int] = set()
        """The pids that were listed last time and did not exist here."""
        self._has_scope = has_scope
        self._table = table
        self._has_shim = has_shim
        self._marker_prefix = f"{installation}/"
        self._pid_reuse = PidReuse()
        self._no_servers: set[tuple[int, bytes]] = set()
        """The processes that were listed last time, and whose program has another name."""
        self.slurm = SlurmProcesses()

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process, or None if it has ended."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                uid, started_at = process.uids().effective, process.create_time()
        except psutil.Error:
            return None
        command = command_of(pid) or ()
        return ProcessIdentity(
            user_name(uid),
            _readable(_full_name(name_of(pid), command)),
            _readable(shlex.join(command)[:_LONGEST_COMMAND]) or None,
            datetime.fromtimestamp(started_at, UTC),
            cgroups.container_of(pid),
        )

    def listed(self, pids: Collection[int], jobs: Sequence[Job]) -> ListedProcesses | None:
        """Return what is known of the processes that the driver lists, each read once; or None."""
        seen: Seen = {}
        found = self._jobs_of(pids, jobs, seen)
        there = {pid: seen[pid] if pid in seen else entry_and_program(pid) for pid in pids}
        starts = {pid: None if each is None else each[0].started for pid, each in there.items()}
        # The driver may still list a dead process. Its pid may by now belong to another job's.
        known = starts.keys() - self._pid_reuse.reused(starts)
        found = {pid: job for pid, job in found.items() if pid in known}
        if not self.knows_pids(known, found):
            return None
        programs = {pid: each[1] for pid in known if (each := there[pid]) and each[1]}
        return ListedProcesses(found, self._mps_servers(programs), programs)

    def _mps_servers(self, programs: Mapping[int, bytes]) -> frozenset[int]:
        """Return the MPS servers among processes, as far as this user can see."""
        unknown = programs.items() - self._no_servers
        named = {each: path for each in unknown if (path := _server_program(each[0]))}
        self._no_servers = programs.items() - named.keys()
        return frozenset(pid for (pid, _), path in named.items() if _is_server(pid, path))

    def living(self, pid: int) -> LivingProcess | None:
        """Return the process that has this pid now, or None if there is none."""
        found = living(pid)
        return found and replace(found, name=_readable(found.name))

    def is_above_daemon(self, pid: int) -> bool:
        """Return whether the daemon is this process or runs below it."""
        daemon = os.getpid()
        return daemon in self._table.jobs_of([daemon], {pid: JobId(0)}, self._marker_prefix, {})

    def is_stopped(self, pid: int) -> bool:
        """Return whether a signal has stopped the process with this pid, as Ctrl-Z does."""
        return is_stopped(pid)

    def pids_of(self, job: Job) -> set[int] | None:
        """Return the processes of a job: in its scope, or below its shim or its holder.

        The shim is not one of them. None if the job has none of these. This reads all of /proc.
        """
        if job.slurm is not None:
            return {each.pid for each in self.slurm.of_job(job.slurm.id)}
        if job.holder is not None:
            return self._of_holder(job)
        has_shim = job.shim_pid is not None and self._has_shim(job.id)
        has_scope = self._has_scope(job.id)
        if not has_shim and not has_scope:
            return None
        found = cgroups.members(job.id) if has_scope else set()
        if has_shim and job.shim_pid is not None:
            found |= {each.pid for each in process_tree.descendants(job.shim_pid)}
        return found - {job.shim_pid}

    def _of_holder(self, job: Job) -> set[int] | None:
        """Return the holder of a lease and what is below it, without processes of other users."""
        if (holder := self.root_of(job)) is None:
            return None
        below = {each.pid for each in process_tree.descendants(holder)}
        return {pid for pid in below | {holder} if real_uid(pid) == job.owner.uid}

    def root_of(self, job: Job) -> int | None:
        """Return the process that those of a job are below; None: it has ended, or is unknown."""
        if job.holder is not None:
            process = job.holder.process
            return None if process is None or has_ended(process) else process.pid
        return job.shim_pid if job.shim_pid is not None and self._has_shim(job.id) else None

    def jobs_of(self, pids: Iterable[int], jobs: Sequence[Job]) -> Mapping[int, JobId]:
        """Return the job of each pid that belongs to one of `jobs`.

        The scope counts first, then Slurm's cgroup or slurmstepd, then the ancestors, then the
        marker. A process below the holder of a
        lease belongs to that lease. If a holder has several leases, a process belongs to the one in
        whose environment it was started, or else to the latest. A holder inside a job does not
        count: it and all processes below it belong to that job's lease. An adopted process may be
        high in the tree, so those of other users below it do not belong to its lease.
        """
        return self._jobs_of(list(pids), jobs, {})

    def _jobs_of(
        self, pids: Collection[int], jobs: Sequence[Job], seen: Seen
    ) -> Mapping[int, JobId]:
        shims = {
            job.shim_pid: job.id
            for job in jobs
            if job.shim_pid is not None and self._has_shim(job.id)
        }
        scopes = {job.id for job in jobs if self._has_scope(job.id)}
        slurm = {job.slurm.id: job.id for job in jobs if job.slurm is not None}
        holders = self._outside_jobs(_holders(jobs), shims, scopes, slurm, seen)
        owners = {job.id: job.owner.uid for job in jobs}
        found = self._table.jobs_of(pids, {**shims, **holders}, self._marker_prefix, owners, seen)
        held = {job.id: job.owner.uid for job in jobs if job.holder is not None}
        adopted = {job.id: job.owner.uid for job in jobs if job.holder and job.holder.adopted}
        below = [pid for pid, job in found.items() if job in held]
        if below:
            found |= self._table.jobs_of(below, {}, self._marker_prefix, held, seen)
        found = {
            pid: job
            for pid, job in found.items()
            if job not in adopted or real_uid(pid) == adopted[job]
        }
        of_slurm = self.slurm.jobs_of(pids, slurm)
        return {**found, **of_slurm, **self._table.in_scopes(pids, scopes)}

    def knows_pids(self, pids: Iterable[int], found: Collection[int]) -> bool:
        """Return whether the pids that a driver lists are those of this pid namespace.

        To a daemon in another pid namespace, a driver may list the pids of the host or none
        (nvidia-container-toolkit#1013); newer kernel modules translate them. They are translated if
        a process of a job, one of `found`, is listed and all other listed pids exist here too: one
        pid alone may exist by chance. This holds until a pid is listed that does not exist here.
        """
        if self._has_own_pids:
            return True
        missing = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
        if missing & self._missing:
            # A process may end after the driver listed it, but not twice in a row.
            self._pids_are_ours = False
        elif found and not missing:
            self._pids_are_ours = True
        self._missing = missing
        return self._pids_are_ours

    def _outside_jobs(
        self,
        holders: Mapping[int, JobId],
        shims: Mapping[int, JobId],
        scopes: set[JobId],
        slurm: Mapping[int, JobId],
        seen: Seen,
    ) -> dict[int, JobId]:
        """Return those of `holders` that are not in a job."""
        if not holders:
            return {}
        # A marker does not count here: the holder may have that of another lease.
        within = self._table.jobs_of(holders, shims, self._marker_prefix, {}, seen)
        within |= self._table.in_scopes(holders, scopes)
        within |= self.slurm.jobs_of(holders, slurm)
        return {pid: job for pid, job in holders.items() if pid not in within}


def _holders(jobs: Sequence[Job]) -> dict[int, JobId]:
    """Return the pids of the living holders of leases."""
    return {
        job.holder.process.pid: job.id
        for job in jobs
        if job.holder is not None
        and job.holder.process is not None
        and not has_ended(job.holder.process)
    }


def claims(jobs: Iterable[Job]) -> Mapping[int, frozenset[GpuUuid]]:
    """Return the GPUs that running processes have leased themselves, by pid."""
    found: dict[int, frozenset[GpuUuid]] = {}
    for job in jobs:
        process = job.holder and job.holder.process
        if process and job.holds_memory and not has_ended(process):
            gpus = frozenset(lease.gpu for lease in job.leases)
            found[process.pid] = found.get(process.pid, frozenset()) | gpus
    return found
