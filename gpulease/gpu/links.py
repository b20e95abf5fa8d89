"""Reads how the GPUs of a machine are linked, and the socket of each, when they are listed.

What the driver does not report counts as no link, and is no fault of a GPU: links decide only which
of several GPUs a job gets. Two GPUs are linked by the NVLinks that end at each other, or, where
their links end at NVSwitches, by those of the GPU that has fewer.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gpulease.domain.gpu import GpuUuid, Link
from gpulease.gpu import nvml_binding
from gpulease.gpu.devices import Device, pci_address
from gpulease.gpu.nvml_errors import INVALID_ARGUMENT, DriverGone, NvmlFailure
from gpulease.wire.text import ranges

_MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of the newest binding; older ones have less."""
_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t; GPUs on one board (0) are behind the switch of the board."""
_MOST_CPUS, _MOST_NODES, _BITS = 8192, 1024, 64
"""The kernel's limits, NR_CPUS and MAX_NUMNODES, and the bits of an element of NVML's masks."""


def with_links(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the GPUs with their links to each other, and with their sockets.

    Raises:
        DriverGone: no GPU can be read.
    """
    able = {each.uuid: each for each in devices if each.handle is not None and each.is_identified}
    ends = {uuid: _ends(each, able.values()) for uuid, each in able.items()}
    links: dict[GpuUuid, list[Link]] = {uuid: [] for uuid in able}
    for one, other in combinations(able.values(), 2):
        link = _between(one, other, ends[one.uuid], ends[other.uuid])
        if link is not None:
            links[one.uuid].append(link)
            links[other.uuid].append(replace(link, gpu=one.uuid))
    return tuple(
        replace(each, links=tuple(links[each.uuid]), numa_node=_numa_node(each), cpus=_cpus(each))
        if each.uuid in able
        else each
        for each in devices
    )


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the active NVLinks of a GPU end."""

    gpus: Counter[GpuUuid]
    elsewhere: int
    """At switches, of which some drivers give no address."""


def _ends(device: Device, devices: Collection[Device]) -> _Ends:
    by_bus = {each.bus: each.uuid for each in devices if each.bus is not None}
    gpus, elsewhere = Counter[GpuUuid](), 0
    for number in range(_MOST_LINKS):
        try:
            is_active = nvml_binding.call("nvmlDeviceGetNvLinkState", device.handle, number) == 1
        except DriverGone:
            raise
        except NvmlFailure as failure:
            if failure.is_not_supported or failure.code == INVALID_ARGUMENT:
                break  # it has no more
            continue
        if is_active:
            end = _ask("nvmlDeviceGetNvLinkRemotePciInfo", device.handle, number)
            uuid = None if end is None else by_bus.get(pci_address(end))
            if uuid is None:
                elsewhere += 1
            else:
                gpus[uuid] += 1
    return _Ends(gpus, elsewhere)


def _between(one: Device, other: Device, ends: _Ends, others: _Ends) -> Link | None:
    """Return the link from one GPU to another; None if nothing is known."""
    nvlinks = ends.gpus[other.uuid]
    through_switch = 0 if nvlinks else min(ends.elsewhere, others.elsewhere)
    if through_switch:
        asked = "nvmlDeviceGetP2PStatus", one.handle, other.handle, nvml_binding.BY_NVLINK
        nvlinks = through_switch if _ask(*asked) == nvml_binding.POSSIBLE else 0
    path = _PATHS.get(_ask("nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle))
    return Link(other.uuid, nvlinks, path) if nvlinks or path is not None else None


def _numa_node(device: Device) -> int | None:
    size, scope = _MOST_NODES // _BITS, nvml_binding.NEAREST_NODE
    nodes = _numbers(_ask("nvmlDeviceGetMemoryAffinity", device.handle, size, scope))
    # Where the machine does not say, it may be all of them.
    return nodes[0] if len(nodes) == 1 else None


def _cpus(device: Device) -> str | None:
    cpus = _numbers(_ask("nvmlDeviceGetCpuAffinity", device.handle, _MOST_CPUS // _BITS))
    return ranges(cpus) if cpus else None


def _numbers(mask: Sequence[int] | None) -> list[int]:
    """Return the numbers of the bits that are set in a mask of NVML's."""
    return [
        place * _BITS + bit
        for place, element in enumerate(mask or ())
        for bit in (range(_BITS) if element else ())
        if element >> bit & 1
    ]


def _ask(name: str, *arguments: object) -> Any:
    """Call `name`, or return None where there is no answer.

    Raises:
        DriverGone: no GPU can be read.
    """
    try:
        return nvml_binding.call(name, *arguments)
    except DriverGone:
        raise
    except NvmlFailure:  # also GpuLost: the next reading shows that
        return None
