"""GPUs that do not exist: for trying gpulease without one, and plain numbers for tests.

They say what NVML would: the same identity over restarts, memory in use, and processes. On this
machine (`SimulatedGpus.here`) the memory is that of real processes; a test gives it as numbers and
changes them as it goes.

The memory that real processes hold on simulated GPUs: what they keep resident for themselves.

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

How busy simulated GPUs are: the CPU time of each process on them, in percent of one CPU.

It stands in for the percentage of time in which a kernel ran.
"""

import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
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
            for gpu in named:
                held[GpuUuid(gpu)][int(pid)] = memory
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


_TICKS = os.sysconf("SC_CLK_TCK")
_SHORTEST_S = 0.05
"""Of what is shorter, the kernel's ticks say nothing."""


class BusyTime:
    """Measures from one reading to the next."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._read_at_s: float | None = None
        self._ticks: dict[tuple[int, int], int] = {}
        self._last: Mapping[GpuUuid, Mapping[int, int]] = {}

    def read(
        self, held: Mapping[GpuUuid, Mapping[int, int]]
    ) -> Mapping[GpuUuid, Mapping[int, int]]:
        """Return the percentage of each process by GPU since the reading before; first nothing.

        `held` has the processes on each GPU, by pid.
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
    """Return when a process started and the CPU time it has had, both in ticks; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # See proc_pid_stat(5): the fields 14, 15 and 22, of which two stand before the bracket.
        return int(fields[19]), int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0, 0


Held = Mapping[GpuUuid, Mapping[int, int]]
"""Bytes by process id, by GPU."""

_MOST_GPUS = 64
_GROUP = re.compile(r"(?:(\d{1,4})\s*x\s*)?(.+)", re.IGNORECASE | re.ASCII | re.DOTALL)
_HINT = f"write the GPUs to simulate as 8G, 2x24G or 2x24G,1x80G, at most {_MOST_GPUS}"
_NAMESPACE = uuid.UUID("8f0c3c0a-6c1e-5b57-9d0e-2f6a41c7b1d4")


def parse_simulation(text: str) -> tuple[int, ...]:
    """Read what `--simulate` accepts and return the size of each GPU in bytes.

    Raises:
        BadValue: `text` is not a list of sizes, or names no GPU, or too many.
    """
    sizes: list[int] = []
    for group in text.split(",")[: _MOST_GPUS + 1]:
        sizes += _parse_group(group.strip())
        if len(sizes) > _MOST_GPUS:
            raise BadValue("cannot simulate so many GPUs: there are bounds to it", _HINT)
    return tuple(sizes)


def _parse_group(group: str) -> list[int]:
    found = _GROUP.fullmatch(group)
    if found is None:
        raise BadValue("cannot simulate GPUs: a size is missing", _HINT)
    count = int(found.group(1) or 1)
    if count == 0:
        raise BadValue("cannot simulate no GPU at all", _HINT)
    try:
        size = parse_size(found.group(2))
    except BadValue as error:
        raise BadValue(error.message, _HINT) from error
    # One more than is allowed says as much as ten thousand.
    return [size] * min(count, _MOST_GPUS + 1)


def simulated_uuid(seed: str, index: int) -> GpuUuid:
    """Return the UUID of the simulated GPU `index`, the same for the same `seed`."""
    return GpuUuid(f"GPU-{uuid.uuid5(_NAMESPACE, f'{seed}/{index}')}")


class SimulatedGpus:
    """GPUs of the sizes given, by UUID; every field may be changed between two readings."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        unmanaged: Mapping[str, int] | None = None,
        processes: Mapping[str, Mapping[int, int]] | None = None,
        faults: Mapping[str, Fault] | None = None,
        residents: Callable[[], Held] | None = None,
    ) -> None:
        """Make GPUs in the order of `sizes`, in bytes.

        `unmanaged` is memory in use with no process to it, `processes` bytes by pid, `faults` what
        is wrong with a GPU; all by UUID. `residents` looks up further processes at each reading.
        """
        self.sizes = dict(sizes)
        self.unmanaged = dict(unmanaged or {})
        self.processes = {gpu: dict(held) for gpu, held in (processes or {}).items()}
        self.faults = dict(faults or {})
        self.heard: list[HealthReport] = []
        self._residents = residents
        self._busy = BusyTime()

    @classmethod
    def here(
        cls, sizes: tuple[int, ...], seed: str, claims: Callable[[], Claims] = dict
    ) -> "SimulatedGpus":
        """Make GPUs whose memory in use is what the processes naming them keep resident.

        `claims` tells which processes hold leases that they took while they ran.
        """
        uuids = [simulated_uuid(seed, index) for index in range(len(sizes))]
        memory = ResidentMemory(uuids)
        return cls(dict(zip(uuids, sizes, strict=True)), residents=lambda: memory.read(claims()))

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
        """Return what a test has put into `heard`; each is heard once."""
        heard, self.heard = tuple(self.heard), []
        return heard

    def close(self) -> None:
        """Do nothing; here so that a probe is a probe."""

    def _reading(
        self,
        gpu: GpuUuid,
        index: int,
        residents: Mapping[int, int],
        busy: Mapping[int, int] | None,
    ) -> GpuReading:
        name = f"Simulated {format_size(self.sizes[gpu])}"
        if gpu in self.faults:
            detail = "the simulation says so"
            return GpuReading(gpu, index, name, fault=self.faults[gpu], detail=detail)
        held = {**residents, **self.processes.get(gpu, {})}
        used = sum(held.values()) + self.unmanaged.get(gpu, 0)
        return GpuReading(
            gpu,
            index,
            name,
            total=self.sizes[gpu],
            # As on hardware, no more than there is; the processes still show their own figures.
            used=min(used, self.sizes[gpu]),
            reserved=0,
            processes=tuple(
                ProcessReading(pid, held[pid], (busy or {}).get(pid)) for pid in sorted(held)
            ),
            utilization=None if busy is None else min(100, sum(busy.values())),
        )
