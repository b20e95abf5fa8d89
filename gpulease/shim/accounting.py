"""What the kernel has counted for a job: RAM, CPU time, and kills for lack of RAM.

A job can read this in its own cgroup, of version 2 or 1, until its last process has ended. Without
a scope only the CPU is known, of the processes that were waited for.
"""

from __future__ import annotations

import os
import resource

from gpulease.record import record, replace
from gpulease.shim.process_tree import read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN = "/proc/self/cgroup"
_ROOT = "/sys/fs/cgroup"
_SCOPE = b"/gpulease-job-"
_NO_LIMIT = 1 << 60
"""Version 1 writes the largest multiple of a page that fits 63 bits for no limit."""


@record(frozen=True)
class HostUse:
    """What a job used of the machine beside its GPUs. None is unknown."""

    ram_peak: int | None = None
    """The most bytes of RAM, of all processes together. Files that the kernel keeps in memory only
    because there is room do not count."""
    cpu_s: float | None = None
    oom_kills: int = 0
    """Its processes that the kernel killed for lack of RAM."""
    ram_limit: int | None = None
    """The limit of its own, in bytes, if these processes were killed because of it."""
    watched: bool = False
    """Its shim has killed them, since no cgroup held the limit."""


def host_use(job: int, own: str = _OWN, root: str = _ROOT) -> HostUse:
    """Return what the processes of this shim have used, after the last of them was reaped."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    largest, cpu_s = used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
    found = HostUse(None, cpu_s)
    for controllers, directory in _directories(job, own, root):
        if not controllers:
            found = _of_version_2(directory, found, largest)
        elif "memory" in controllers:
            found = _of_version_1(directory, found, largest)
    return found


def kernel_limit(job: int, own: str = _OWN, root: str = _ROOT) -> int | None:
    """Return the limit of RAM, in bytes, that the cgroup of a job's scope has; None without one."""
    for controllers, directory in _directories(job, own, root):
        name = "memory.limit_in_bytes" if "memory" in controllers else "memory.max"
        limit = _number(f"{directory}/{name}")
        if limit is not None and limit < _NO_LIMIT:
            return limit
    return None


def _directories(job: int, own: str, root: str) -> Iterator[tuple[list[str], str]]:
    """Yield the directories of this job's scope, with their controllers; none for version 2."""
    content = read_proc(own)
    for line in content.splitlines() if _SCOPE in content else ():
        _, controllers, path = os.fsdecode(line).split(":", 2)
        if path.endswith(f"{os.fsdecode(_SCOPE)}{job}.scope"):
            yield [each for each in controllers.split(",") if each], f"{root}/{controllers}{path}"


def _of_version_2(directory: str, found: HostUse, largest: int) -> HostUse:
    cpu_us = numbers(f"{directory}/cpu.stat").get("usage_usec")
    if cpu_us is not None:
        found = replace(found, cpu_s=cpu_us / 1e6)  # also of processes that nobody waited for
    events = numbers(f"{directory}/memory.events")
    if not events:
        return found  # without accounting, or version 1 has the controllers
    peak, limit = _number(f"{directory}/memory.peak"), _number(f"{directory}/memory.max")
    cached = numbers(f"{directory}/memory.stat")
    files = cached.get("file", 0) - cached.get("shmem", 0)
    kills = events.get("oom_kill", 0)
    # If RAM is short in the slice or the machine, `oom` counts there, and not here.
    reached = limit if kills and events.get("oom") else None
    return replace(
        found,
        ram_peak=_without_files(peak, files, largest), oom_kills=kills, ram_limit=reached,
    )  # fmt: skip


def _of_version_1(directory: str, found: HostUse, largest: int) -> HostUse:
    peak = _number(f"{directory}/memory.max_usage_in_bytes")
    limit = _number(f"{directory}/memory.limit_in_bytes")
    cached = numbers(f"{directory}/memory.stat")
    files = cached.get("total_cache", 0) - cached.get("total_shmem", 0)
    kills = numbers(f"{directory}/memory.oom_control").get("oom_kill", 0)
    has_limit = limit is not None and limit < _NO_LIMIT
    reached = limit if kills and has_limit and _number(f"{directory}/memory.failcnt") else None
    return replace(
        found,
        ram_peak=_without_files(peak, files, largest), oom_kills=kills, ram_limit=reached,
    )  # fmt: skip


def _without_files(peak: int | None, files: int, largest: int) -> int | None:
    """Return the peak of what a job needed, given that of what was charged to its cgroup.

    What it read and wrote counts there until others need the room, and stays when it has ended.
    The peak of its largest process is a lower bound, of a job that needed much and read much later.
    """
    return None if peak is None else max(peak - max(0, files), min(largest, peak))


def _number(path: str) -> int | None:
    """Return the number in a file of the kernel; None for "max" and where there is none."""
    text = read_proc(path).strip()
    return int(text) if text.isdigit() else None


def numbers(path: str) -> dict[str, int]:
    """Return the named numbers in a file of the kernel; empty if it cannot be read."""
    pairs = (line.partition(b" ")[::2] for line in read_proc(path).splitlines())
    return {name.decode(): int(number) for name, number in pairs if number.isdigit()}
