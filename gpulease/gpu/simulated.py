"""Simulated GPUs: for trying gpulease without a GPU, and for tests.

They report what NVML would: an identity that survives restarts, memory in use, and processes. With
`SimulatedGpus.here` the memory is that of real processes on this machine; tests set numbers.

A process is on a GPU if its environment names the GPU, no matter who launched it. A process that
leased a GPU while it ran has changed its environment, which the kernel does not show. Such claims
are passed in, and count for the process and its forks as long as the lease lasts.

Processes: the kernel shows the environment at exec. Reading it is slow for large environments, so
it is read once per exec. An exec is recognised by the auxiliary vector, a few hundred bytes with
random addresses that change at every exec and that a fork inherits. (The start time does not change
at an exec, nor does the executable when a Python starts a Python.) Most processes on a machine name
no GPU and execute no other program: after their first second they are read once a second at most.

Memory: anonymous pages stand in for GPU memory. After `import tensorflow` a process has about 180
MiB of them, beside 300 MiB of mapped libraries that processes share. Mapped files and shared memory
in /dev/shm do not count. A forked child shares its parent's pages until one of them writes: with
2.3 GiB each, the two hold 2.3 GiB together. Processes with the same auxiliary vector are forks; for
them the kernel computes proportional sizes, at about 5 ms per GiB.

Utilization: the CPU time of each process, in percent of one CPU.
"""

import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid, ProcessReading
from gpulease.domain.health import HealthReport
from gpulease.errors import BadValue
from gpulease.units import format_size, parse_size

_VARIABLE = b"\0CUDA_VISIBLE_DEVICES="
_CHUNK = 32 * 1024
_MOST_CHUNKS = 256
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KERNEL_THREAD = 0x200000
"""PF_KTHREAD of include/linux/sched.h."""
_CONTEXT = 64 * 1024**2
"""Bytes above which a process with a claim counts as on the GPU; a shell, or a Python without
frameworks, has less."""

Claims = Mapping[int, Collection[GpuUuid]]
"""The GPUs that processes leased while they ran, by pid."""
_NONE: Claims = MappingProxyType({})


_YOUNG_S = 1.0
"""A process usually executes its program within this time."""
_READ_AGAIN_S = 1.0


class _Seen(NamedTuple):
    vector: bytes
    named: frozenset[str] | None
    """None if the environment was empty, as during an exec; it is read again."""
    inode: int
    """Of its directory, which another process with the pid lacks."""
    first_s: float
    read_s: float

    def is_still_as_read(self, inode: int, now_s: float) -> bool:
        """Whether this process names no GPU and needs no look now."""
        return (
            self.inode == inode
            and not self.named
            and now_s - self.first_s > _YOUNG_S
            and now_s - self.read_s < _READ_AGAIN_S
        )


class ResidentMemory:
    """Measures the memory of the processes on this machine that name one of `uuids`."""

    def __init__(
        self,
        uuids: Collection[GpuUuid],
        proc: Path = Path("/proc"),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._uuids = frozenset(uuids)
        self._proc = str(proc)
        self._seen: dict[str, _Seen] = {}
        self._kernel_threads: dict[str, int] = {}
        """The inodes of their directories by pid."""

    def read(self, claims: Claims = _NONE) -> Mapping[GpuUuid, Mapping[int, int]]:
        """Return the bytes of each process on each GPU that it names or claims, by GPU and pid.

        Processes with an unreadable environment are skipped: a daemon without privileges sees those
        of its own user.
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
            for gpu in named:
                held[GpuUuid(gpu)][int(pid)] = memory
        return held

    def _leased(self, here: Mapping[str, _Seen], claims: Claims) -> Mapping[str, frozenset[str]]:
        """Return the claimed GPUs by pid, for processes with a claim and their forks."""
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
                # After an exec a process has another vector, and its environment counts.
                if here[pid].vector == here[holder].vector:
                    leased[pid] = leased[holder]
                    below.append(pid)
        return leased

    def _parent(self, pid: str) -> str:
        return b"".join(self._stat(pid)[1:2]).decode()

    def _stat(self, pid: str) -> list[bytes]:
        """Return the fields after the name; see proc_pid_stat(5), which counts from the pid."""
        return self._file(pid, "stat").rpartition(b")")[2].split()

    def _look(self) -> Iterator[tuple[str, _Seen]]:
        skipped, self._kernel_threads = self._kernel_threads, {}
        with os.scandir(self._proc) as entries:  # a Path for each would double the cost
            pids = {each.name: each.inode() for each in entries if each.name.isdigit()}
        now_s = self._now_s()
        for pid, inode in pids.items():
            seen = self._seen.get(pid)
            if skipped.get(pid) == inode:
                self._kernel_threads[pid] = inode
            elif seen is not None and seen.is_still_as_read(inode, now_s):
                yield pid, seen
            elif vector := self._file(pid, "auxv"):
                yield pid, self._read_again(pid, inode, vector, now_s)
            elif self._is_kernel_thread(pid):
                self._kernel_threads[pid] = inode

    def _read_again(self, pid: str, inode: int, vector: bytes, now_s: float) -> _Seen:
        seen = self._seen.get(pid)
        if seen is None or seen.inode != inode:
            return _Seen(vector, self._named(pid), inode, now_s, now_s)
        is_known = seen.vector == vector and seen.named is not None
        named = seen.named if is_known else self._named(pid)
        return _Seen(vector, named, inode, seen.first_s, now_s)

    def _is_kernel_thread(self, pid: str) -> bool:
        """Tell kernel threads from zombies and from processes whose vector may not be read."""
        flags = self._stat(pid)[6:7]
        return bool(flags) and bool(int(flags[0]) & _KERNEL_THREAD)

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
        # The third field is the resident memory that maps files or shared memory.
        return (int(sizes[1]) - int(sizes[2])) * _PAGE if len(sizes) > 2 else 0

    def _file(self, pid: str, name: str) -> bytes:
        """Return the contents of a file in /proc; empty if it cannot be read."""
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
    # A chunk that is not full is the last: one call is enough for most files.
    while len(chunks[-1]) == _CHUNK and len(chunks) < _MOST_CHUNKS:
        chunks.append(os.read(descriptor, _CHUNK))
    return b"".join(chunks)


_TICKS = os.sysconf("SC_CLK_TCK")
_SHORTEST_S = 0.05
"""Shorter intervals are below the resolution of the kernel's ticks."""


class CpuTime:
    """Measures the CPU utilization of processes between two readings."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._read_at_s: float | None = None
        self._ticks: dict[tuple[int, int], int] = {}
        self._last: Mapping[GpuUuid, Mapping[int, int]] = {}

    def read(
        self, held: Mapping[GpuUuid, Mapping[int, int]]
    ) -> Mapping[GpuUuid, Mapping[int, int]]:
        """Return the percentage of each process since the last reading, by GPU and pid.

        `held` has the processes on each GPU, by pid. The first call returns nothing.
        """
        at_s, before = self._now_s(), self._read_at_s
        if before is not None and at_s - before < _SHORTEST_S:
            return self._last
        times = {pid: _ticks_of(pid) for pids in held.values() for pid in pids}
        spent = {
            pid: ticks - self._ticks.get((pid, started), 0)
            for pid, (started, ticks) in times.items()
        }
        self._ticks = {(pid, started): ticks for pid, (started, ticks) in times.items()}
        self._read_at_s = at_s
        if before is None:
            return {}
        room = (at_s - before) * _TICKS
        self._last = {
            gpu: {pid: int(100 * spent[pid] / room) for pid in pids} for gpu, pids in held.items()
        }
        return self._last


def _ticks_of(pid: int) -> tuple[int, int]:
    """Return the start and the CPU time of a process in ticks; 0 for both if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # See proc_pid_stat(5): the fields 14, 15 and 22; two fields precede the parenthesis.
        return int(fields[19]), int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0, 0


Held = Mapping[GpuUuid, Mapping[int, int]]
"""Bytes by GPU and pid."""

_MOST_GPUS = 64
_GROUP = re.compile(
    r"(?:(\d{1,4})\s*x\s*)?([^:]+)(?::([ \w.-]{1,40}))?", re.IGNORECASE | re.ASCII | re.DOTALL
)
_HINT = f"give the GPUs as 8G, 2x24G or 2x24G,1x80G:A100, at most {_MOST_GPUS}"
_NAMESPACE = uuid.UUID("8f0c3c0a-6c1e-5b57-9d0e-2f6a41c7b1d4")


class SimulatedGpu(NamedTuple):
    """What one simulated GPU is."""

    size: int
    """Bytes."""
    model: str


def parse_simulation(text: str) -> tuple[SimulatedGpu, ...]:
    """Parse the argument of `--simulate` and return each GPU.

    Raises:
        BadValue: `text` is not a list of sizes, or has no GPU or too many.
    """
    gpus: list[SimulatedGpu] = []
    for group in text.split(",")[: _MOST_GPUS + 1]:
        gpus += _parse_group(group.strip())
        if len(gpus) > _MOST_GPUS:
            raise BadValue(f"cannot simulate more than {_MOST_GPUS} GPUs", _HINT)
    return tuple(gpus)


def _parse_group(group: str) -> list[SimulatedGpu]:
    found = _GROUP.fullmatch(group)
    if found is None:
        raise BadValue("cannot simulate GPUs: a size is missing", _HINT)
    count = int(found.group(1) or 1)
    if count == 0:
        raise BadValue("cannot simulate 0 GPUs", _HINT)
    try:
        size = parse_size(found.group(2))
    except BadValue as error:
        raise BadValue(f"cannot simulate {group!r}: its size cannot be read", _HINT) from error
    gpu = SimulatedGpu(size, (found.group(3) or format_size(size)).strip())
    # One more than allowed is enough for the error.
    return [gpu] * min(count, _MOST_GPUS + 1)


def simulated_uuid(seed: str, index: int) -> GpuUuid:
    """Return the UUID of the simulated GPU `index`; the same for the same `seed`."""
    return GpuUuid(f"GPU-{uuid.uuid5(_NAMESPACE, f'{seed}/{index}')}")


class SimulatedGpus:
    """GPUs with given sizes, by UUID; all public fields may be changed between two readings."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        unmanaged: Mapping[str, int] | None = None,
        processes: Mapping[str, Mapping[int, int]] | None = None,
        faults: Mapping[str, Fault] | None = None,
        residents: Callable[[], Held] | None = None,
        models: Mapping[str, str] | None = None,
    ) -> None:
        """Create GPUs in the order of `sizes`.

        Args:
            sizes: bytes by UUID.
            unmanaged: bytes in use without a process, by UUID.
            processes: bytes by UUID and pid.
            faults: the faults of unreadable GPUs, by UUID.
            residents: returns further processes at each reading.
            models: the models, by UUID; the others are named after their sizes.
        """
        self.sizes = dict(sizes)
        self.unmanaged = dict(unmanaged or {})
        self.processes = {gpu: dict(held) for gpu, held in (processes or {}).items()}
        self.faults = dict(faults or {})
        self.reports: list[HealthReport] = []
        self._residents = residents
        self._models = dict(models or {})
        self._busy = CpuTime()

    @classmethod
    def here(
        cls, gpus: Sequence[SimulatedGpu], seed: str, claims: Callable[[], Claims] = dict
    ) -> "SimulatedGpus":
        """Create GPUs with the resident memory of the processes on this machine that name them.

        `claims` returns the GPUs that processes leased while they ran.
        """
        here = {simulated_uuid(seed, index): gpu for index, gpu in enumerate(gpus)}
        memory = ResidentMemory(list(here))
        return cls(
            {uuid: gpu.size for uuid, gpu in here.items()},
            residents=lambda: memory.read(claims()),
            models={uuid: gpu.model for uuid, gpu in here.items()},
        )

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU, by index."""
        held = self._residents() if self._residents else {}
        busy = self._busy.read(held)
        return tuple(
            self._reading(GpuUuid(gpu), index, held.get(GpuUuid(gpu), {}), busy.get(GpuUuid(gpu)))
            for index, gpu in enumerate(self.sizes)
        )

    def driver(self) -> str | None:
        """Return None: there is no driver."""
        return None

    def library(self) -> str | None:
        """Return None: NVML is not used."""
        return None

    def health(self) -> tuple[HealthReport, ...]:
        """Return the reports that a test has put into `reports`, each once."""
        reports, self.reports = tuple(self.reports), []
        return reports

    def close(self) -> None:
        """Do nothing; part of the probe's interface."""

    def _reading(
        self,
        gpu: GpuUuid,
        index: int,
        residents: Mapping[int, int],
        busy: Mapping[int, int] | None,
    ) -> GpuReading:
        name = f"Simulated {self._models.get(gpu) or format_size(self.sizes[gpu])}"
        if gpu in self.faults:
            detail = "simulated fault"
            return GpuReading(gpu, index, name, fault=self.faults[gpu], detail=detail)
        held = {**residents, **self.processes.get(gpu, {})}
        used = sum(held.values()) + self.unmanaged.get(gpu, 0)
        return GpuReading(
            gpu,
            index,
            name,
            total=self.sizes[gpu],
            # As on hardware, not more than the total; processes keep their own values.
            used=min(used, self.sizes[gpu]),
            reserved=0,
            processes=tuple(
                ProcessReading(pid, held[pid], (busy or {}).get(pid)) for pid in sorted(held)
            ),
            # That of new processes is unknown until the second look at them.
            utilization=None if busy is None and held else min(100, sum((busy or {}).values())),
        )
