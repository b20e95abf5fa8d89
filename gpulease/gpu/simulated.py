"""GPUs that do not exist: for trying gpulease without one, and plain numbers for tests.

They say what NVML would: the same identity over restarts, memory in use, and processes. On this
machine (`SimulatedGpus.here`) the memory is that of real processes; a test gives it as numbers and
changes them as it goes.
"""

import re
import uuid
from collections.abc import Callable, Mapping

from gpulease.domain.health import Heard
from gpulease.domain.memory import Fault, GpuReading, GpuUuid, ProcessReading
from gpulease.errors import BadValue
from gpulease.gpu.busy import BusyTime
from gpulease.gpu.resident import Claims, ResidentMemory
from gpulease.units import format_size, parse_size

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
        self.heard: list[Heard] = []
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

    def health(self) -> tuple[Heard, ...]:
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
