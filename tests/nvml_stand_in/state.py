"""What the stand-in says: the cards of a machine, and what is wrong with them.

Written as a file of lines, a word and its values each, which the library reads at every call. Lines
before the first `gpu` are about the driver; those after one are about that GPU.
"""

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from nvml_stand_in.library import DRIVER, build, build_cuda

HANG = -1.0
"""A delay that lasts until the state is changed."""

_M = 1024**2
_G = 1024**3
_LIMITS = ("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1")
_LIMITS_SINCE = 615
_NOT_AVAILABLE = 2**64 - 1
_POWER_LIMITS = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
_MEMORY_FUNCTIONS = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")

Processes = Sequence[tuple[int, int | None]]
"""Pids and bytes; None for what the driver does not tell."""


class Code(IntEnum):
    """NVML's answers, as far as tests need them."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    GPU_IS_LOST = 15
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999
    CRASH = 9999
    """No answer of NVML's: the process ends by SIGSEGV in the call."""


@dataclass(frozen=True)
class Part:
    """One MIG device of a GPU; one without a UUID is a place where there is none."""

    uuid: str = "-"
    total: int = 10 * _G
    used: int = 0
    reserved: int = 0
    processes: Sequence[tuple[int, int | None]] = ()
    fault: tuple[str, int] | None = None
    """A function that fails for it alone, and its code."""

    def lines(self) -> list[str]:
        """Return what the library reads about this device."""
        whole = f"part {self.uuid} {self.total} {self.used} {self.reserved}"
        fault = [] if self.fault is None else ["part_fault {} {}".format(*self.fault)]
        return [whole, *_process_lines("part_process", self.processes), *fault]


@dataclass(frozen=True)
class Card:
    """One GPU; None stands for what it does not support."""

    total: int | None = 80 * _G
    used: int = 0
    reserved: int = 0
    processes: Processes = ()
    graphics: Processes = ()
    name: str = "NVIDIA Stand-in"
    uuid: str = ""
    """Made from its place among the cards if left out."""
    utilization: int | None = 0
    samples: Sequence[tuple[int, int]] | None = ()
    """Who computed of late, and in what percentage of the time."""
    temperature: int | None = 40
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    mig: bool | None = False
    parts: Sequence["Part"] = ()
    """Its MIG devices, by their place."""
    compute_mode: int | None = 0
    ecc: int | None = 0
    """Memory errors that could not be corrected."""
    remap_pending: bool | None = False
    remap_failed: bool = False
    pages_pending: bool | None = False
    recovery: int | None = 0
    """What the driver asks for to have it well again, as NVML counts."""
    xids: Sequence[int] = ()
    """All that it has had since the driver was loaded, oldest first."""
    lost: bool = False
    stays_lost: bool = False
    """A session of NVML that it was lost to does not find it again: only a new one does."""
    long_records: bool = False
    """Its newest process lists have records longer than the binding expects."""
    minor: int | None = None
    """The number of its device node."""
    bus: str | None = None
    """Its PCI address, as in 00000000:3B:00.0."""
    links: Sequence[str | None] = ()
    """Of each NVLink the address of what it ends at; None: it is inactive. Empty: it has none."""
    ancestors: Sequence[int] = ()
    """How near it is to each card by its place, as nvmlGpuTopologyLevel_t says."""
    node: int | None = None
    """The NUMA node whose memory is nearest."""
    cpus: Sequence[int] = ()
    """The processors of its socket, below 64."""
    step: int = 256 * _M
    """Memory limits on it are rounded down to multiples of this; up if it is below zero. At zero
    they are taken and not kept."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Codes by function; a name that ends in * stands for all that begin so."""
    delays: Mapping[str, float] = field(default_factory=dict)
    """Seconds by function, or HANG."""

    def lines(self) -> list[str]:
        """Return what the library reads about this card."""
        return [
            f"gpu {self.uuid}",
            f"name {self.name}",
            f"memory {self.total or 0} {self.used} {self.reserved}",
            f"utilization {self.utilization or 0}",
            *(f"sample {pid} {percent}" for pid, percent in self.samples or ()),
            f"temperature {self.temperature or 0}",
            f"power {round(1000 * (self.power or 0))} {round(1000 * (self.power_limit or 0))}",
            f"mig {int(bool(self.mig))}",
            f"long_records {int(self.long_records)}",
            f"compute_mode {self.compute_mode or 0}",
            f"stays_lost {int(self.stays_lost)}",
            "health "
            + " ".join(
                str(-1 if figure is None else int(figure))
                for figure in (
                    self.ecc,
                    self.remap_pending,
                    self.remap_failed,
                    self.pages_pending,
                    self.recovery,
                )
            ),
            *(f"xid {number} {len(list(same))}" for number, same in groupby(self.xids)),
            *(line for part in self.parts for line in part.lines()),
            *(f"link {end or '-'}" for end in self.links),
            *(f"ancestor {level}" for level in self.ancestors),
            f"affinity {_mask(() if self.node is None else (self.node,))} {_mask(self.cpus)}",
            f"step {self.step}",
            f"minor {self.minor or 0}",
            *([] if self.bus is None else [f"bus {self.bus}"]),
            *_process_lines("compute", self.processes),
            *_process_lines("graphics", self.graphics),
            *_fault_lines(self._all_faults()),
            *_delay_lines(self.delays),
        ]

    def _all_faults(self) -> dict[str, int]:
        if self.lost:
            return {"nvmlDevice*": Code.GPU_IS_LOST}
        absent: list[str] = []
        absent += _MEMORY_FUNCTIONS if self.total is None else ()
        absent += ["nvmlDeviceGetUtilizationRates"] if self.utilization is None else []
        absent += ["nvmlDeviceGetProcessUtilization"] if self.samples is None else []
        absent += ["nvmlDeviceGetTemperature*"] if self.temperature is None else []
        absent += ["nvmlDeviceGetPowerUsage"] if self.power is None else []
        absent += _POWER_LIMITS if self.power_limit is None else ()
        absent += ["nvmlDeviceGetMigMode"] if self.mig is None else []
        absent += ["nvmlDeviceGetComputeMode"] if self.compute_mode is None else []
        absent += ["nvmlDeviceGetMinorNumber"] if self.minor is None else []
        absent += ["nvmlDeviceGetPciInfo_v3"] if self.bus is None else []
        return dict.fromkeys(absent, int(Code.NOT_SUPPORTED)) | dict(self.faults)


@dataclass(frozen=True)
class Told:
    """What one caller was told, and when, by the machine's clock."""

    at: float
    function: str
    uuid: str
    code: int
    used: int


class StandIn:
    """A machine's driver: a library on disk, and the state that it shows."""

    def __init__(
        self,
        folder: Path,
        gpus: Sequence[Card] = (Card(),),
        *,
        driver: str = DRIVER,
        missing: Sequence[str] = (),
        faults: Mapping[str, int] | None = None,
        delays: Mapping[str, float] | None = None,
        seen_as: Path | None = None,
    ) -> None:
        """Install `driver` under `folder`, without the functions in `missing`.

        `faults` and `delays` hold for the functions of the driver as a whole; see `Card`.
        `seen_as` is what `folder` is called where the driver is used, if that is in a container.
        """
        self._seen = (seen_as or folder) / "nvml"
        self._folder = folder / "nvml"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._state = self._folder / "state"
        self._calls = self._folder / "calls"
        self._limits = self._folder / "limits"
        self._held = self._folder / "held"
        self._told = self._folder / "told"
        self._chance = (0, 0)
        self._loaded = driver
        self._faults = dict(faults or {})
        self._delays = dict(delays or {})
        self.gpus: tuple[Card, ...] = ()
        self.install(driver, missing)
        self.update(gpus=gpus)

    def environment(self) -> dict[str, str]:
        """Return the variables with which a child process finds this driver."""
        paths = [str(self._seen), os.environ.get("LD_LIBRARY_PATH", "")]
        first = self.gpus[0].uuid if self.gpus else "none"
        return {
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
            "NVML_STAND_IN": str(self._seen / self._state.name),
            "CUDA_STAND_IN": str(self._seen / self._held.name / first),
        }

    def with_cuda(self) -> "StandIn":
        """Have programs allocate on the first card through CUDA; what they hold is shown there."""
        shutil.copy(build_cuda(), self._folder)
        (self.held(0) / "total").write_text(str(self.gpus[0].total))
        return self

    def held(self, index: int) -> Path:
        """Return the folder of one card where each process that allocates there has a file.

        Its name is the pid, and it says how many bytes; it counts while that process lives.
        """
        folder = self._held / self.gpus[index].uuid
        if not folder.exists():
            folder.mkdir(parents=True)
            self._write()
        return folder

    def told(self) -> list[Told]:
        """Return what callers were told of memory in use, and every failure."""
        if not self._told.exists():
            return []
        lines = [line.split() for line in self._told.read_text(encoding="ascii").splitlines()]
        return [
            Told(int(us) / 1e6, function, uuid, int(code), int(used))
            for us, function, uuid, code, used in lines
        ]

    def update(
        self,
        *,
        gpus: Sequence[Card] | None = None,
        faults: Mapping[str, int] | None = None,
        delays: Mapping[str, float] | None = None,
        chance: tuple[float, int] | None = None,
    ) -> None:
        """Replace what is given; processes that use the library see it at their next call.

        `chance` is the share of all calls that fail for no reason, and the seed by which they do.
        """
        if gpus is not None:
            self.gpus = tuple(
                card if card.uuid else replace(card, uuid=self.uuid(index))
                for index, card in enumerate(gpus)
            )
        self._faults = self._faults if faults is None else dict(faults)
        self._delays = self._delays if delays is None else dict(delays)
        if chance is not None:
            self._chance = (round(chance[0] * 1_000_000), chance[1])
        self._write()

    def change(self, index: int, **fields: Any) -> None:
        """Change fields of one card."""
        cards = list(self.gpus)
        cards[index] = replace(cards[index], **fields)
        self.update(gpus=cards)

    def install(self, driver: str, missing: Sequence[str] = ()) -> None:
        """Put another release of the library on disk, as an upgrade does under running programs."""
        for old in self._folder.glob("libnvidia-ml.so.*"):
            old.unlink()
        if int(driver.partition(".")[0]) < _LIMITS_SINCE:
            missing = (*missing, *_LIMITS)
        library = self._folder / f"libnvidia-ml.so.{driver}"
        shutil.copy(build(driver, frozenset(missing)), library)
        (self._folder / "libnvidia-ml.so.1").symlink_to(library.name)

    def load(self, driver: str) -> None:
        """Load another release into the kernel: libraries of any other refuse to work with it."""
        self._loaded = driver
        self._write()

    def calls(self) -> list[str]:
        """Return every call so far, as the function and the UUID it was about, or -."""
        if not self._calls.exists():
            return []
        return self._calls.read_text(encoding="ascii").splitlines()

    def limits(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the soft and the hard limit by the UUID of the GPU and the cgroup's directory."""
        if not self._limits.exists():
            return {}
        lines = [line.split(" ", 3) for line in self._limits.read_text().splitlines()]
        return {(uuid, path): (int(soft), int(hard)) for uuid, soft, hard, path in lines}

    def forget_limits(self) -> None:
        """Keep no cgroup to a limit any more."""
        self._limits.unlink(missing_ok=True)

    @staticmethod
    def uuid(index: int) -> str:
        """Return the UUID of the card that stood at `index` when it was first given."""
        return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'stand-in {index}')}"

    def _write(self) -> None:
        kept = {"calls": self._calls.name, "limits": self._limits.name}
        kept |= {"told": self._told.name} if self._held.exists() else {}
        lines = [f"driver {self._loaded}", f"chance {self._chance[0]} {self._chance[1]}"]
        lines += [f"{word} {self._seen / name}" for word, name in kept.items()]
        lines += [*_fault_lines(self._faults), *_delay_lines(self._delays)]
        for card in self.gpus:
            lines += card.lines()
            if (self._held / card.uuid).exists():
                lines.append(f"held {self._seen / self._held.name / card.uuid}")
        new = self._state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n", encoding="ascii")
        new.replace(self._state)


def _mask(bits: Sequence[int]) -> int:
    return sum(1 << bit for bit in bits)


def _process_lines(word: str, processes: Processes) -> list[str]:
    return [
        f"{word} {pid} {_NOT_AVAILABLE if memory is None else memory}" for pid, memory in processes
    ]


def _fault_lines(faults: Mapping[str, int]) -> list[str]:
    return [f"fault {function} {int(code)}" for function, code in faults.items()]


def _delay_lines(delays: Mapping[str, float]) -> list[str]:
    return [
        f"delay {function} {-1 if seconds == HANG else round(seconds * 1000)}"
        for function, seconds in delays.items()
    ]
