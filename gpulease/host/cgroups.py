"""Cgroups as the kernel shows them: the scope of a job, or the container, that a process is in.

Only a scope below the system's own gpulease.slice counts. A slice of the same name that a user's
systemd makes lies below user.slice, and no user can move a process into root's cgroups.

What the scopes of jobs are called; known to who makes them and to who finds them.

Whether this process counts pids as the machine does, or stands in a pid namespace of its own.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SLICE = "gpulease.slice"


def scope_name(job: int) -> str:
    """Return the name of the unit, and of its cgroup."""
    return f"gpulease-job-{job}.scope"


_SCOPE = re.compile(rf"/{re.escape(SLICE)}/gpulease-job-([1-9][0-9]{{0,17}})\.scope(?:/|$)")
_CONTAINER = re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")
"""As docker, podman, containerd and cri-o end the name of a cgroup, with systemd or without."""
_NO_CONTAINER = "libpod-conmon-"
"""The monitor of a container of podman's is outside of it, in a cgroup with its id in the name."""
_SHORT = 12
"""As many digits as `docker ps` and `podman ps` show."""
_FOLLOWED = ("", "name=systemd")
"""The hierarchies that systemd keeps: version 2, and its own of version 1."""


def scope_of(pid: int) -> int | None:
    """Return the number of the job in whose scope, or below it, a process is; None for others."""
    for controllers, path in _lines(pid):
        if controllers in _FOLLOWED and (found := _SCOPE.match(path)):
            return int(found[1])
    return None


def container_of(pid: int) -> str | None:
    """Return the short id of the container that a process is in, or None."""
    for _, path in _lines(pid):
        for name in reversed(path.split("/")):
            found = _CONTAINER.search(name)
            if found and not name.startswith(_NO_CONTAINER):
                return found[1][:_SHORT]
    return None


def members(job: int) -> set[int]:
    """Return the pids of all who are in the scope of a job, or in a cgroup below it."""
    found: set[int] = set()
    for hierarchy in _hierarchies():
        for directory, _, _ in os.walk(hierarchy / SLICE / scope_name(job)):
            found |= _procs(Path(directory))
    # Who is in a pid namespace that cannot be seen from here is shown as 0.
    return found - {0}


def directory_of(job: int) -> Path | None:
    """Return the directory of a job's scope in cgroups of version 2, or None if there is none."""
    for hierarchy in _hierarchies():
        path = hierarchy / SLICE / scope_name(job)
        if (path / "cgroup.events").exists():
            return path
    return None


def device_directory_of(job: int) -> Path | None:
    """Return the directory of a job's scope where device rules are kept, or None."""
    for hierarchy in (*_mounts()[2], *_unified()):
        if (path := hierarchy / SLICE / scope_name(job)).is_dir():
            return path
    return None


def own_directory() -> Path | None:
    """Return the directory of this process's cgroup of version 2, or None."""
    for controllers, path in _lines(os.getpid()):
        if not controllers and _unified():
            return _unified()[0] / path.lstrip("/")
    return None


def scopes() -> Iterator[tuple[int, Path]]:
    """Yield the number and the directory of every job's scope in cgroups of version 2."""
    for hierarchy in _hierarchies():
        for path in (hierarchy / SLICE).glob("gpulease-job-*.scope"):
            found = _SCOPE.match(f"/{SLICE}/{path.name}")
            if found and (path / "cgroup.events").exists():
                yield int(found[1]), path


def has_version_2() -> bool:
    """Tell whether cgroups of version 2 are mounted here."""
    return bool(_unified())


def _procs(directory: Path) -> set[int]:
    try:
        return {int(line) for line in (directory / "cgroup.procs").read_text().split()}
    except OSError:
        return set()  # it has just gone, or holds threads alone


def _lines(pid: int) -> Iterator[tuple[str, str]]:
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers, path


def _hierarchies() -> tuple[Path, ...]:
    return _mounts()[0]


def _unified() -> tuple[Path, ...]:
    return _mounts()[1]


@cache
def _mounts() -> tuple[tuple[Path, ...], tuple[Path, ...], tuple[Path, ...]]:
    """Return where the hierarchies are that systemd keeps, those of version 2, those of devices."""
    followed, unified, devices = [], [], []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        path = Path(before.split()[4])
        if kind == "cgroup2":
            unified.append(path)
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            followed.append(path)
        if kind == "cgroup" and "devices" in options.split(","):
            devices.append(path)
    return tuple(followed), tuple(unified), tuple(devices)


_FIRST = 0xEFFFFFFC
"""The inode of the first pid namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h), since 3.8."""


def has_first_pids(link: Path = Path("/proc/self/ns/pid")) -> bool:
    """Tell whether this is the first pid namespace, that of the machine; also if nobody says."""
    try:
        return link.stat().st_ino == _FIRST
    except OSError:
        return True
