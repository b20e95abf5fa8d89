"""Simulated GPUs: for trying gpulease without a GPU, and for tests.

They report what NVML would: an identity that survives restarts, memory in use, and processes.

Processes: a process is on a GPU if its environment names the GPU, no matter who launched it. A
process that leased a GPU while it ran has changed its environment, which the kernel does not show.
Such claims are passed in. gpulease's own commands, also those in such a job, open no GPU.

Memory: anonymous pages stand in for GPU memory. After `import tensorflow` a process has about 180
MiB of them, beside 300 MiB of mapped libraries that processes share. Mapped files and shared memory
in /dev/shm do not count.

Utilization: the CPU time of each process, in percent of one CPU.
"""

import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulease.domain.gpu import GpuReading, GpuUuid, ProcessReading
from gpulease.domain.health import HealthReport
from gpulease.errors import BadValue
from gpulease.shim.process_tree import read_proc
from gpulease.units import format_size, parse_size

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


_VARIABLE = b"\0CUDA_VISIBLE_DEVICES="
_OWN_COMMAND = re.compile(
    rb"[^\0]+\0(-P\0)?(([^\0]*/)?gpulease(d|-web)?|-m\0gpulease\.(cli|daemon|web))\0"
)
_CONTEXT = 64 * 1024**2
"""Bytes above which a process with a claim counts as on the GPU; a shell, or a Python without
frameworks, has less."""
_YOUNG_S = 1.0
"""A process usually executes its program within this time."""
_READ_AGAIN_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")
_SHORTEST_S = 0.05
"""Shorter intervals are below the resolution of the kernel's ticks."""

Claims = Mapping[int, Collection[GpuUuid]]
"""The GPUs that processes leased while they ran, by pid."""


class _Nameless(NamedTuple):
    """A process that names no GPU here."""

    inode: int
    """Of its directory, which another process with the pid lacks."""
    first_s: float
    read_s: float


class SimulatedGpus:
    """GPUs with the resident memory of the processes on this machine that name them."""

    def __init__(
        self, gpus: Sequence[SimulatedGpu], seed: str, claims: Callable[[], Claims] = dict
    ) -> None:
        """`claims` returns the GPUs that processes leased while they ran."""
        self.gpus = {simulated_uuid(seed, index): gpu for index, gpu in enumerate(gpus)}
        self._claims = claims
        self._nameless: dict[str, _Nameless] = {}
        self._ticks: dict[int, int] = {}
        self._ticks_at_s: float | None = None
        self._busy: dict[int, int] = {}

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU, by index."""
        named = dict(self._naming())
        memory = {pid: _memory(pid) for pid in named}
        for pid, gpus in self._claims().items():
            held = _memory(pid)
            if held >= _CONTEXT:
                named[pid] = named.get(pid, frozenset()) | (self.gpus.keys() & frozenset(gpus))
                memory[pid] = held
        is_first = self._ticks_at_s is None
        self._measure(sorted(memory))
        readings = []
        for index, (uuid_, gpu) in enumerate(self.gpus.items()):
            processes = tuple(
                ProcessReading(pid, memory[pid], self._busy.get(pid))
                for pid in sorted(named)
                if uuid_ in named[pid]
            )
            busy = sum(each.utilization or 0 for each in processes)
            readings.append(
                GpuReading(
                    uuid_,
                    index,
                    f"Simulated {gpu.model}",
                    total=gpu.size,
                    # As on hardware, not more than the total; processes keep their own values.
                    used=min(sum(each.memory or 0 for each in processes), gpu.size),
                    reserved=0,
                    processes=processes,
                    utilization=None if is_first and processes else min(100, busy),
                )
            )
        return tuple(readings)

    def _naming(self) -> Iterator[tuple[int, frozenset[GpuUuid]]]:
        """Yield the processes that name a GPU, and the GPUs.

        Processes with an unreadable environment are skipped: a daemon without privileges sees those
        of its own user.
        """
        before, self._nameless, now_s = self._nameless, {}, time.monotonic()
        with os.scandir("/proc") as entries:  # a Path for each would double the cost
            here = {each.name: each.inode() for each in entries if each.name.isdigit()}
        for pid, inode in here.items():
            seen = before.get(pid)
            if seen is None or seen.inode != inode:
                seen = _Nameless(inode, now_s, now_s)
            elif (
                # Read before, it may have had the environment of the process that forked it.
                seen.read_s - seen.first_s > _YOUNG_S and now_s - seen.read_s < _READ_AGAIN_S
            ):
                # Most processes execute no other program, and kernel threads have no environment.
                # At one reading a second, to read them all takes 0.1 s of CPU a minute.
                self._nameless[pid] = seen
                continue
            environment = b"\0" + read_proc(f"/proc/{pid}/environ")
            value = environment.partition(_VARIABLE)[2].partition(b"\0")[0]
            words = {GpuUuid(each.strip()) for each in value.decode(errors="replace").split(",")}
            if gpus := self.gpus.keys() & words:
                if not _OWN_COMMAND.match(read_proc(f"/proc/{pid}/cmdline")):
                    yield int(pid), frozenset(gpus)
            else:
                self._nameless[pid] = seen._replace(read_s=now_s)

    def _measure(self, pids: Sequence[int]) -> None:
        """Measure the utilization of processes since the last time; new ones have none yet."""
        now_s, before_s = time.monotonic(), self._ticks_at_s
        if before_s is not None and now_s - before_s < _SHORTEST_S:
            return
        before, self._ticks, self._ticks_at_s = self._ticks, {}, now_s
        self._busy = {}
        for pid in pids:
            # See proc_pid_stat(5): the fields 14 and 15; two fields precede the parenthesis.
            fields = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            if len(fields) > 12:
                self._ticks[pid] = int(fields[11]) + int(fields[12])
            if before_s is not None and pid in before and pid in self._ticks:
                spent = max(0, self._ticks[pid] - before[pid])
                self._busy[pid] = int(100 * spent / ((now_s - before_s) * _TICKS))

    def driver(self) -> str | None:
        """Return None: there is no driver."""
        return None

    def library(self) -> str | None:
        """Return None: NVML is not used."""
        return None

    def health(self) -> tuple[HealthReport, ...]:
        """Return nothing: simulated GPUs have no faults."""
        return ()

    def close(self) -> None:
        """Do nothing; part of the probe's interface."""


def _memory(pid: int) -> int:
    """Return the anonymous memory of a process in bytes.

    A forked child shares the pages of its parent until one of them writes: with 2.3 GiB each, the
    two hold 2.3 GiB together. The proportional size counts them once, at about 5 ms per GiB.
    """
    for line in read_proc(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0
