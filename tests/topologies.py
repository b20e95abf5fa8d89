"""Machines with eight GPUs as `nvidia-smi topo -m` shows them."""

from collections.abc import Mapping
from dataclasses import replace

from gpulease.domain.gpu import PATHS, GpuReading, GpuUuid, Link

_G = 1024**3
_PAIRS = """
X NV4 NODE NODE SYS SYS SYS SYS
NV4 X NODE NODE SYS SYS SYS SYS
NODE NODE X NV4 SYS SYS SYS SYS
NODE NODE NV4 X SYS SYS SYS SYS
SYS SYS SYS SYS X NV4 NODE NODE
SYS SYS SYS SYS NV4 X NODE NODE
SYS SYS SYS SYS NODE NODE X NV4
SYS SYS SYS SYS NODE NODE NV4 X
"""
TOPOLOGIES: Mapping[str, str] = {
    # Eight V100: a hybrid cube mesh, with one or two links of a GPU to four others.
    "DGX-1 mesh": """
X NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X SYS SYS SYS NV1
NV2 SYS SYS SYS X NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X
""",
    "bridged pairs": _PAIRS,
    "NVSwitch": "\n".join(
        " ".join("X" if one == other else "NV12" for other in range(8)) for one in range(8)
    ),
    "PCIe only": _PAIRS.replace("NODE", "PXB").replace("NV4", "PIX"),
}
_NVSWITCH = "00000000:C{:X}:00.0"


def matrix(name: str) -> list[list[str]]:
    """Return the words between each two GPUs."""
    return [line.split() for line in TOPOLOGIES[name].split("\n") if line]


def readings(name: str, total: int = 80 * _G) -> tuple[GpuReading, ...]:
    """Return the eight GPUs of a machine, empty, with their links."""
    gpus = [GpuReading(GpuUuid(f"GPU-{n}"), n, "Fake", total, 0, 0, ()) for n in range(8)]
    return tuple(
        replace(
            gpu,
            links=tuple(
                Link(other.uuid, int(word.removeprefix("NV")))
                if word.startswith("NV")
                else Link(other.uuid, 0, word)
                for other, word in zip(gpus, row, strict=True)
                if other is not gpu
            ),
        )
        for gpu, row in zip(gpus, matrix(name), strict=True)
    )


def bus(index: int) -> str:
    """Return the PCI address of a GPU, as NVML writes it."""
    return f"00000000:{16 + index:02X}:00.0"


def nvml_links(name: str) -> list[list[str]]:
    """Return the addresses at which the NVLinks of each GPU end, as NVML reports them."""
    if name == "NVSwitch":
        return [[_NVSWITCH.format(link // 2) for link in range(12)] for _ in range(8)]
    return [
        [
            bus(other)
            for other, word in enumerate(row)
            for _ in range(int(word.removeprefix("NV")) if word.startswith("NV") else 0)
        ]
        for row in matrix(name)
    ]


def nvml_ancestors(name: str) -> list[list[int]]:
    """Return how near each two GPUs are, as nvmlGpuTopologyLevel_t says.

    The matrices do not say it of GPUs that NVLink links: those are under one host bridge.
    """
    levels = dict(zip(PATHS, (50, 40, 30, 20, 10), strict=True)) | {"X": 0}
    return [[levels.get(word, 30) for word in row] for row in matrix(name)]
