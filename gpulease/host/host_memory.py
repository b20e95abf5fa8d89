"""Reads the RAM and the cores of this machine, and the RAM that jobs with a lease of it use."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpulease.domain.gpu import JobId
from gpulease.domain.host_memory import HostReading
from gpulease.domain.job import Job
from gpulease.host import cgroups, proc_reader
from gpulease.shim import process_tree
from gpulease.shim.accounting import numbers
from gpulease.shim.process_tree import read_proc

_KIB = 1024
_KEPT = ("anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables", "sock")
"""What a cgroup has that the kernel cannot take back, as in memory.stat. The files that it has in
memory besides are in MemAvailable."""


class HostProbe:
    """Takes readings of the machine. For any thread."""

    def __init__(
        self,
        root_of: Callable[[Job], int | None],
        has_scope: Callable[[JobId], bool],
        meminfo: str = "/proc/meminfo",
    ) -> None:
        """`root_of` returns the process that those of a job are below, or None.

        `has_scope` says whether this daemon put a job into a scope.
        """
        self._root_of = root_of
        self._has_scope = has_scope
        self._meminfo = meminfo

    def read(self, holding: Iterable[Job]) -> HostReading:
        """Return a reading, given the jobs that hold leases."""
        # The jobs first: what one allocates in between counts as used by others, and not as free.
        used = self._used([job for job in holding if job.claim.ram is not None])
        sizes = _sizes(read_proc(self._meminfo))
        return HostReading(
            sizes.get("MemTotal"), sizes.get("MemAvailable"), len(os.sched_getaffinity(0)), used
        )

    def _used(self, jobs: Iterable[Job]) -> dict[JobId, int]:
        used, roots = {}, {}
        for job in jobs:
            size = _used_in_scope(job.id) if self._has_scope(job.id) else None
            if size is not None:
                used[job.id] = size
            elif (root := self._root_of(job)) is not None:
                roots[job.id] = root
        children: dict[int, list[int]] = {}
        for each in process_tree.processes() if roots else ():
            children.setdefault(each.parent, []).append(each.pid)
        return used | {job: _used_below(root, children) for job, root in roots.items()}


def _used_in_scope(job: JobId) -> int | None:
    directory = cgroups.directory_of(job)
    stat = {} if directory is None else numbers(f"{directory}/memory.stat")
    return sum(stat.get(name, 0) for name in _KEPT) if stat else None


def _used_below(root: int, children: Mapping[int, Sequence[int]]) -> int:
    pids = [root]
    for pid in pids:
        pids += children.get(pid, ())
    return sum(map(_used_by, pids))


def _used_by(pid: int) -> int:
    # Of pages that processes share, each has its part: forked data loaders share most of them.
    lines = (proc_reader.read(pid, "smaps_rollup") or b"").splitlines()
    wanted = (line for line in lines if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")))
    return sum(int(line.split()[1]) * _KIB for line in wanted)


def _sizes(content: bytes) -> dict[str, int]:
    """Return the bytes by name in a file of the kernel with lines such as `MemTotal: 8 kB`."""
    lines = (line.split() for line in content.decode().splitlines() if line.endswith(" kB"))
    return {line[0].rstrip(":"): int(line[-2]) * _KIB for line in lines}
