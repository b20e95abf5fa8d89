"""The memory that real processes hold on simulated GPUs: what they keep resident for themselves.

A process is on a GPU when its environment names it, as on hardware, whoever launched it. One that
has leased it while it ran has a new environment, which the kernel does not show: who holds such a
lease is told, and counts with those that it forks, for as long as the lease lasts.

Which processes: the kernel shows the environment that a process was exec'ed with. Reading it costs
with its length, so it is read once per *exec*, which is told by the auxiliary vector: a few hundred
bytes of addresses that the kernel draws anew at every exec and a fork inherits. (The start time is
the same before and after an exec, and so is the executable where a Python starts a Python.)

Which memory: anonymous pages. After `import tensorflow` a process has some 180 MiB of them, beside
300 MiB of mapped libraries which every process on the machine shares, and a memory-mapped data set
would count as if it lay on the GPU. What several processes share in /dev/shm is left out as well.
A forked child shares its parent's pages until one of them writes: of 2.3 GiB each, the two hold
2.3 GiB together. Processes with the same auxiliary vector are such forks; for them the kernel is
asked for proportional figures, at some 5 ms for each GiB.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gpulease.domain.memory import GpuUuid

_VARIABLE = b"\0CUDA_VISIBLE_DEVICES="
_CHUNK = 32 * 1024
_MOST_CHUNKS = 256
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CONTEXT = 64 * 1024**2
"""Bytes that the holder of a lease has at least once it is on a GPU: a shell, or a Python that has
loaded nothing, is on none."""

Claims = Mapping[int, Collection[GpuUuid]]
"""The GPUs that processes have leased while they ran, by pid."""
_NONE: Claims = MappingProxyType({})


class _Seen(NamedTuple):
    vector: bytes
    named: frozenset[str] | None
    """None if it showed no environment, as in the midst of an exec: to be looked at again."""


class ResidentMemory:
    """Watches the processes of this machine for those that name one of `uuids`."""

    def __init__(self, uuids: Collection[GpuUuid], proc: Path = Path("/proc")) -> None:
        self._uuids = frozenset(uuids)
        self._proc = str(proc)
        self._seen: dict[str, _Seen] = {}

    def read(self, claims: Claims = _NONE) -> Mapping[GpuUuid, Mapping[int, int]]:
        """Return the bytes that each process holds on each GPU that it names, or has leased.

        Processes whose environment may not be read are passed over, so that a daemon without
        privileges sees those of its own user.
        """
        here = dict(self._look())
        self._seen = here
        leased = self._leased(here, claims)
        users = {pid: seen for pid, seen in here.items() if seen.named or pid in leased}
        forks = Counter(seen.vector for seen in users.values())
        held: dict[GpuUuid, dict[int, int]] = {uuid: {} for uuid in self._uuids}
        for pid, seen in users.items():
            memory = self._held(pid, is_fork=forks[seen.vector] > 1)
            named = seen.named or frozenset()
            if memory >= _CONTEXT:
                named |= leased.get(pid, frozenset())
            for uuid in named:
                held[GpuUuid(uuid)][int(pid)] = memory
        return held

    def _leased(self, here: Mapping[str, _Seen], claims: Claims) -> Mapping[str, frozenset[str]]:
        """Return what the holders of leases have leased, and with them those that they forked."""
        leased = {
            str(pid): self._uuids & frozenset(gpus)
            for pid, gpus in claims.items()
            if str(pid) in here
        }
        vectors = {here[pid].vector for pid in leased}
        if not vectors:
            return leased
        parents = {
            pid: self._parent(pid)
            for pid, seen in here.items()
            if seen.vector in vectors and pid not in leased
        }
        below = list(leased)
        for holder in below:
            for pid in [pid for pid, parent in parents.items() if parent == holder]:
                del parents[pid]
                # What was exec'ed since has a vector of its own, and an environment to look at.
                if here[pid].vector == here[holder].vector:
                    leased[pid] = leased[holder]
                    below.append(pid)
        return leased

    def _parent(self, pid: str) -> str:
        # See proc_pid_stat(5): the second field after the name, which stands in brackets.
        fields = self._file(pid, "stat").rpartition(b")")[2].split()
        return fields[1].decode() if len(fields) > 1 else ""

    def _look(self) -> Iterator[tuple[str, _Seen]]:
        for pid in os.listdir(self._proc):  # noqa: PTH208 - a Path for each would double the cost
            # Kernel threads and zombies have an empty vector.
            if pid.isdigit() and (vector := self._file(pid, "auxv")):
                seen = self._seen.get(pid)
                if seen is None or seen.vector != vector or seen.named is None:
                    seen = _Seen(vector, self._named(pid))
                yield pid, seen

    def _named(self, pid: str) -> frozenset[str] | None:
        environment = self._file(pid, "environ")
        if not environment:
            return None
        value = (b"\0" + environment).partition(_VARIABLE)[2].partition(b"\0")[0]
        return self._uuids & {item.strip() for item in value.decode(errors="replace").split(",")}

    def _held(self, pid: str, is_fork: bool) -> int:
        if is_fork:
            for line in self._file(pid, "smaps_rollup").splitlines():
                if line.startswith(b"Pss_Anon:"):
                    return int(line.split()[1]) * 1024
        sizes = self._file(pid, "statm").split()
        # Of what is resident, the third figure is what maps a file or shared memory.
        return (int(sizes[1]) - int(sizes[2])) * _PAGE if len(sizes) > 2 else 0

    def _file(self, pid: str, name: str) -> bytes:
        """Return what the kernel tells, or nothing if the process is gone or not ours to read."""
        try:
            descriptor = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return _read(descriptor)
        except OSError:
            return b""
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> bytes:
    chunks = [os.read(descriptor, _CHUNK)]
    # A chunk that is not full is the last: one call is enough for nearly every file.
    while len(chunks[-1]) == _CHUNK and len(chunks) < _MOST_CHUNKS:
        chunks.append(os.read(descriptor, _CHUNK))
    return b"".join(chunks)
