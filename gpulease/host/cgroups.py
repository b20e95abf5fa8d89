"""Cgroups as the kernel shows them: which job's scope or which container a process is in.

Only scopes below the system's gpulease.slice count. A slice of this name that a user's systemd
makes is below user.slice, and users cannot move a process into root's cgroups.
"""

import os
import re
import time
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from gpulease.shim.accounting import kernel_limit
from gpulease.shim.process_tree import entry, read_proc

SLICE = "gpulease.slice"


def scope_name(job: int) -> str:
    """Return the name of a job's scope, which is the name of its cgroup."""
    return f"gpulease-job-{job}.scope"


_SCOPE = re.compile(rf"/{re.escape(SLICE)}/gpulease-job-([1-9][0-9]{{0,17}})\.scope(?:/|$)")
_CONTAINER = re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")
"""The end of a cgroup's name in docker, podman, containerd and cri-o, with or without systemd."""
_NO_CONTAINER = "libpod-conmon-"
"""podman's monitor of a container runs outside of it, in a cgroup whose name has its id."""
_SHORT = 12
"""The digits that `docker ps` and `podman ps` show."""
_NAMED = "name=systemd"
_SYSTEMD = ("", _NAMED)
"""The hierarchies of systemd: version 2, and the named one of version 1."""


def scope_of(pid: int) -> int | None:
    """Return the job in whose scope a process is, or below it; None for other processes."""
    for controllers, path in _parsed(read_proc(f"/proc/{pid}/cgroup")):
        if controllers in _SYSTEMD and (found := _SCOPE.match(path)):
            return int(found[1])
    return None


_SLURM = re.compile(
    r"((?:/[^/]+)*/(?:slurm(?:_[^/]+)?/uid_[0-9]+|(?:[^/]+_)?slurmstepd\.scope)/"
    r"(?:job_([1-9][0-9]{0,17})|\w+(?=/step_)))(?:/|$)"
)
"""The cgroup of a job of Slurm: slurm/uid_U/job_N in version 1, slurmstepd.scope/job_N in version
2, with the name of the node where a machine has several (Slurm, "Control Group v2 plugin"). Slurm
26.05 writes the SLUID of the job in place of job_N in version 2."""


def slurm_directory(pid: int) -> tuple[Path, int | None] | None:
    """Return the cgroup of the job of Slurm that a process is in, and the number in its name.

    Users can give a cgroup such a name where they may create one, but then they own it.
    """
    for controllers, path in _parsed(read_proc(f"/proc/{pid}/cgroup")):
        if found := _SLURM.match(path):
            mount = _mount_of(controllers)
            directory = None if mount is None else mount / found[1].lstrip("/")
            if directory is not None and _is_of_root(directory):
                return directory, None if found[2] is None else int(found[2])
    return None


def slurm_directories() -> Iterator[Path]:
    """Yield the cgroups of Slurm's jobs in version 2."""
    for hierarchy in _mounts().unified:
        for place in ("system.slice/slurmstepd.scope", "system.slice/*_slurmstepd.scope"):
            yield from filter(_is_of_root, hierarchy.glob(f"{place}/*"))


def slurm_steps_in(directory: Path) -> set[int]:
    """Return the pids of the slurmstepds in the cgroup of a job of Slurm, of version 2."""
    return {pid for step in directory.glob("step_*/slurm") for pid in _procs(step)} - {0}


def _is_of_root(directory: Path) -> bool:
    try:
        return directory.stat().st_uid == 0
    except OSError:
        return False


def container_of(pid: int) -> str | None:
    """Return the short id of the container that a process is in, or None."""
    found = _container_in(read_proc(f"/proc/{pid}/cgroup"))
    return None if found is None else found[1]


def in_container_of_root(pid: int) -> bool:
    """Return whether a process is in a container that an engine has started as root.

    Users can give a cgroup such a name where they may create one, but then they own it, and they
    cannot move a process into root's cgroups.
    """
    found = _container_in(read_proc(f"/proc/{pid}/cgroup"))
    if found is None:
        return False
    directories = [hierarchy / found[0] for hierarchy in _mounts().systemd]
    owners = {path.stat().st_uid for path in directories if path.is_dir()}
    return owners == {0}


@lru_cache(maxsize=256)
def _container_in(content: bytes) -> tuple[str, str] | None:
    """Return the cgroup of the container that a process is in, and its short id; or None.

    `content` is that of /proc/PID/cgroup; many processes share a cgroup.
    """
    for _, path in _parsed(content):
        names = path.strip("/").split("/")
        for place, name in reversed(tuple(enumerate(names, 1))):
            found = _CONTAINER.search(name)
            if found and not name.startswith(_NO_CONTAINER):
                return "/".join(names[:place]), found[1][:_SHORT]
    return None


def members(job: int) -> set[int]:
    """Return the pids of all processes in the scope of a job, or in a cgroup below it."""
    found: set[int] = set()
    for hierarchy in _mounts().systemd:
        for directory, _, _ in os.walk(hierarchy / SLICE / scope_name(job)):
            found |= _procs(Path(directory))
    # A process in a pid namespace that is not visible from here is shown as 0.
    return found - {0}


def directory_of(job: int) -> Path | None:
    """Return the directory of a job's scope in cgroups of version 2, or None."""
    for hierarchy in _mounts().systemd:
        path = hierarchy / SLICE / scope_name(job)
        if (path / "cgroup.events").exists():
            return path
    return None


def device_directory_of(job: int) -> Path | None:
    """Return the directory of a job's scope in the hierarchy of device rules, or None."""
    first = (path for options, path in _mounts().first if "devices" in options)
    for hierarchy in (*first, *_mounts().unified):
        if (path := hierarchy / SLICE / scope_name(job)).is_dir():
            return path
    return None


def own_directory() -> Path | None:
    """Return the directory of this process's cgroup of version 2, or None."""
    for controllers, path in _parsed(read_proc("/proc/self/cgroup")):
        if not controllers and (mount := _mount_of("")) is not None:
            return mount / path.lstrip("/")
    return None


def scopes() -> Iterator[tuple[int, Path]]:
    """Yield the job and the directory of every scope in cgroups of version 2."""
    for hierarchy in _mounts().systemd:
        for path in (hierarchy / SLICE).glob("gpulease-job-*.scope"):
            found = _SCOPE.match(f"/{SLICE}/{path.name}")
            if found and (path / "cgroup.events").exists():
                yield int(found[1]), path


def holds_ram(job: int, shim: int | None) -> bool:
    """Return whether the scope of a job, in which its shim is, limits its RAM."""
    return shim is not None and kernel_limit(job, f"/proc/{shim}/cgroup") is not None


def has_version_2() -> bool:
    """Return whether cgroups of version 2 are mounted."""
    return bool(_mounts().unified)


def _procs(directory: Path) -> set[int]:
    try:
        return {int(line) for line in (directory / "cgroup.procs").read_text().split()}
    except OSError:
        return set()  # it was just removed, or is a threaded cgroup


def _parsed(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the controllers and the path of each line of /proc/PID/cgroup."""
    for line in os.fsdecode(content).split("\n")[:-1]:
        _, controllers, path = line.split(":", 2)
        yield controllers, path


_SETTLED_S = 10.0
"""A runtime moves a process into its container right after the fork."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OUTSIDE = -1.0


class ContainerProcesses:
    """Finds all processes in containers, and reads the cgroups of young processes only.

    A process of this age that is outside containers stays there, so it is read no more. The inode
    of its directory in /proc tells it from a later process with its pid, see `proc_fill_cache` in
    fs/proc/base.c of Linux.
    """

    def __init__(self, settled_s: float = _SETTLED_S) -> None:
        self._settled_s = settled_s
        self._settles_at: dict[int, float] = {}
        """For each process by inode, in seconds since boot; `_OUTSIDE` if it stays outside."""

    def look(self) -> list[int]:
        """Return the pids of the processes in containers."""
        before, self._settles_at = self._settles_at, {}
        inside = []
        with os.scandir("/proc") as names:
            for name in names:
                if not name.name.isdigit():
                    continue
                pid, inode = int(name.name), name.inode()
                settles_at = before.get(inode)
                if settles_at is None:
                    found = entry(pid)
                    started_s = _boot_s() if found is None else found.started / _TICKS_PER_S
                    settles_at = started_s + self._settled_s
                if settles_at != _OUTSIDE:
                    # The age first: what is read later belongs to a process at least as old.
                    is_settled = _boot_s() >= settles_at
                    content = read_proc(f"/proc/{pid}/cgroup")
                    if _container_in(content) is not None:
                        inside.append(pid)
                    elif content and is_settled:
                        settles_at = _OUTSIDE
                self._settles_at[inode] = settles_at
        return inside


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _mount_of(controllers: str) -> Path | None:
    """Return where the hierarchy of these controllers is mounted; "" is version 2."""
    if not controllers:
        return next(iter(_mounts().unified), None)
    wanted = set(controllers.split(","))
    return next((path for options, path in _mounts().first if wanted <= options), None)


class _Mounts(NamedTuple):
    unified: tuple[Path, ...]
    """Of version 2."""
    first: tuple[tuple[frozenset[str], Path], ...]
    """Of version 1, with their options."""

    @property
    def systemd(self) -> tuple[Path, ...]:
        """Those in which systemd puts the processes of a unit."""
        return (*self.unified, *(path for options, path in self.first if _NAMED in options))


@cache
def _mounts() -> _Mounts:
    unified, first = [], []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        path = Path(before.split()[4])
        if kind == "cgroup2":
            unified.append(path)
        elif kind == "cgroup":
            first.append((frozenset(options.split(",")), path))
    return _Mounts(tuple(unified), tuple(first))


_FIRST = 0xEFFFFFFC
"""The inode of the initial pid namespace since 3.8 (PROC_PID_INIT_INO, linux/proc_ns.h)."""


def in_initial_pid_namespace(link: Path = Path("/proc/self/ns/pid")) -> bool:
    """Return whether this is the pid namespace of the machine, or this is not known."""
    try:
        return link.stat().st_ino == _FIRST
    except OSError:
        return True
