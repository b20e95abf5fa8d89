"""What Slurm should know of this node: the lines of its files, with counts from the driver.

Slurm counts memory of GPUs in shards (gres.conf(5)), and divides a Count evenly over the GPUs of a
node. Where they differ in size, each GPU gets a line for its shards.

Each run of equal GPUs has a Type. Without one, Slurm 22.05 gives a job that asks for a whole GPU
one whose shards are in use. Slurm numbers GPUs by the order of the types in Gres= of slurm.conf, so
the types are in the order of the device numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gpulease.client import Client
from gpulease.config import SYSTEM_CONFIG, Settings, SlurmSettings
from gpulease.domain.gpu import GpuReading, GpuUuid, build_ledger
from gpulease.errors import GpuleaseError, SetupFailed
from gpulease.gpu.nvml import NvmlProbe
from gpulease.gpu.simulated import parse_simulation
from gpulease.path_ownership import shaky
from gpulease.service.ports import SlurmPolicy
from gpulease.service.slurm_gpus import device_number, gpus_of_slurm, missing_local_gpus
from gpulease.setup.install import Say, write_file
from gpulease.units import GIB, format_size
from gpulease.wire.machine import StatusView

_ANSWER_WITHIN_S = 10.0
NAME = "gpulease-hook"
DIRECTORY = Path("/etc/slurm")
"""Where the hook is, unless the admin names other directories."""
MARK = "for gpulease"
"""In every version of the script."""
_SOURCE = Path(__file__).with_name("hook.pl")
_SOCKET = "/run/gpulease/gpuleased.sock"
_LONGEST_SOCKET = 107
"""Bytes of sockaddr_un (unix(7)), less the last null byte."""


@dataclass(frozen=True, slots=True)
class Run:
    """GPUs in consecutive places with equally many shards."""

    type: str
    shards: int
    """Of each GPU."""
    minors: list[int]


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """This node."""

    name: str
    shard: int
    """Bytes of one shard."""
    gpus: tuple[GpuReading, ...]
    """The GPUs for Slurm, by device number."""
    local: tuple[GpuReading, ...] = ()
    """Those of the local queue."""
    margin: int = 0
    """Bytes of each GPU that are never leased."""
    simulated: bool = False

    @property
    def minors(self) -> list[int]:
        """The numbers in the names of the device files."""
        return [device_number(gpu) for gpu in self.gpus]

    @property
    def shards(self) -> list[int]:
        """The number of shards of each GPU."""
        sizes = [build_ledger(gpu, (), {}, self.margin).allocatable for gpu in self.gpus]
        return [(size or 0) // self.shard for size in sizes]

    @property
    def runs(self) -> list[Run]:
        """The GPUs in runs of equal numbers of shards."""
        runs: list[Run] = []
        minors = iter(self.minors)
        for shards, alike in groupby(self.shards):
            size = f"mem{shards * self.shard // GIB}g"
            before = sum(run.type.partition("_")[0] == size for run in runs)
            kind = f"{size}_{before + 1}" if before else size
            runs.append(Run(kind, shards, [next(minors) for _ in alike]))
        return runs

    @property
    def gres(self) -> str:
        """Return what Gres= of slurm.conf says, such as gpu:mem24g:2,shard:192."""
        gpus = ",".join(f"gpu:{run.type}:{len(run.minors)}" for run in self.runs)
        return f"{gpus},shard:{sum(self.shards)}"

    def gres_conf(self) -> Iterator[str]:
        """Yield the lines of gres.conf."""
        runs, head = self.runs, f"NodeName={self.name} Name="
        yield "AutoDetect=off"
        if len(runs) == 1:
            yield f"{head}gpu Type={runs[0].type} File={device_files(runs[0].minors)}"
            yield f"{head}shard Count={sum(self.shards)}"
            return
        for run in runs:
            for minor in run.minors:
                yield f"{head}gpu Type={run.type} File={device_files([minor])}"
                yield f"{head}shard Count={run.shards} File={device_files([minor])}"


def device_files(minors: Sequence[int]) -> str:
    """Return the files of some GPUs as Slurm writes a list: /dev/nvidia[0-2,5]."""
    if len(minors) == 1:
        return f"/dev/nvidia{minors[0]}"
    ranges = []
    for _, group in groupby(enumerate(minors), lambda pair: pair[1] - pair[0]):
        run = [minor for _, minor in group]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return f"/dev/nvidia[{','.join(ranges)}]"


def read_node(settings: Settings) -> SlurmNode:
    """Return this node, with the GPUs of a simulation or those of the driver.

    Raises:
        NoGpus: the machine has none.
        SetupFailed: Slurm cannot have one of them.
    """
    readings, simulated = _read_gpus(settings)
    return node_of(settings, readings, simulated=simulated)


def node_of(settings: Settings, readings: Sequence[GpuReading], *, simulated: bool) -> SlurmNode:
    """Return this node with some GPUs.

    Raises:
        SetupFailed: Slurm cannot have one of them.
    """
    slurm = SlurmSettings(**settings.slurm)
    policy = SlurmPolicy(slurm.shard, slurm.local_gpus)
    if missing := missing_local_gpus(readings, policy):
        raise SetupFailed(
            f"cannot describe this node: local_gpus names {', '.join(missing)}, and this machine "
            "has no such GPU",
            f"in {SYSTEM_CONFIG}, use indexes or UUIDs; nvidia-smi -L lists both",
        )
    kept = gpus_of_slurm(readings, policy)
    for gpu in kept:
        if (why := _unusable(gpu, simulated=simulated)) is not None:
            raise SetupFailed(
                f"cannot count the shards of GPU {gpu.label}: {why}",
                f'to keep it out of Slurm: local_gpus = "{gpu.label}" below [slurm] in '
                f"{SYSTEM_CONFIG}",
            )
    if not kept:
        raise SetupFailed("cannot describe this node: local_gpus leaves no GPU for Slurm")
    local = tuple(gpu for gpu in readings if gpu.parent is None and gpu not in kept)
    return SlurmNode(slurm.node_name, slurm.shard, kept, local, settings.margin, simulated)


def _unusable(gpu: GpuReading, *, simulated: bool) -> str | None:
    if gpu.mig_mode:
        return "it is in MIG mode, and Slurm has no shards of MIG devices"
    if gpu.fault is not None or gpu.total is None:
        return gpu.detail or "the driver does not report its memory"
    if gpu.minor is None and not simulated:
        return "the driver does not report the number of its device file"
    return None


def daemon_status(settings: Settings) -> StatusView | None:
    """Return what the daemon of this node says, or None if it does not answer."""
    with suppress(GpuleaseError):
        return Client(settings.socket, answer_within=_ANSWER_WITHIN_S).status()
    return None


def _read_gpus(settings: Settings) -> tuple[Sequence[GpuReading], bool]:
    """Return the GPUs, and whether they are simulated: a daemon may do so by its command line."""
    status = daemon_status(settings)
    if status is not None and status.simulated:
        return [_simulated(it.index, it.memory.total, it.uuid) for it in status.gpus], True
    if settings.simulate is not None:
        made = parse_simulation(settings.simulate)
        return [_simulated(index, it.size) for index, it in enumerate(made)], True
    probe = NvmlProbe.open(settings.driver_deadline)
    try:
        return probe.read(), False
    finally:
        probe.close()


def _simulated(index: int, size: int | None, uuid: str = "") -> GpuReading:
    return GpuReading(GpuUuid(uuid or str(index)), index, "simulated", total=size)


def shown_sizes(node: SlurmNode) -> str:
    """Return the number of GPUs and their shards for people."""
    parts = [
        f"{len(run.minors)} x {run.shards} shards ({format_size(run.shards * node.shard)})"
        for run in node.runs
    ]
    return ", ".join(parts)


def hook_text(socket: Path) -> str:
    """Return the script for the daemon on `socket`.

    Raises:
        SetupFailed: the path does not fit into the script or into the address of a socket.
    """
    name = str(socket)
    if not socket.is_absolute() or set(name) & set("'\\\n") or len(name) > _LONGEST_SOCKET:
        raise SetupFailed(
            f"cannot install the hook: the socket {name!r} is no absolute path of at most "
            f"{_LONGEST_SOCKET} plain characters",
            f"leave out the setting socket: the default is {_SOCKET}",
        )
    return _SOURCE.read_text().replace(f"'{_SOCKET}'", f"'{name}'", 1)


def install_hook(directories: Sequence[Path], socket: Path, say: Say) -> None:
    """Write the script into each directory; Slurm runs it as root.

    Raises:
        SetupFailed: a directory does not exist, or users can change it.
    """
    text = hook_text(socket)
    for directory in directories:
        if not directory.is_dir():
            raise SetupFailed(
                f"cannot install the hook: {directory} is no directory",
                "name the directory of your prologs: gpulease-setup slurm --install DIRECTORY",
            )
        if (why := shaky(directory, 0)) is not None:
            raise SetupFailed(f"cannot install the hook, which root runs: {why}")
    for directory in directories:
        say(f"{write_file(directory / NAME, text, 0o755)} {directory / NAME}")
