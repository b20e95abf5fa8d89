"""Lists the driver's GPUs and matches them with those known before.

The UUID identifies a GPU. Its index may change whenever the driver is initialised. A GPU that has
fallen off the bus keeps its identity.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid, Link
from gpulease.gpu import nvml_binding
from gpulease.gpu.nvml_binding import Handle
from gpulease.gpu.nvml_errors import DriverGone, GpuLost, NvmlFailure

_UNKNOWN = "unknown-"
_UNNAMED = "unnamed GPU"
_NO_UUID = "the driver reports no UUID (Tegra?), so it cannot be leased"
_NO_LONGER_LISTED = "the driver no longer lists this GPU"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of this machine; without a `handle` it cannot be read, because of `fault`."""

    uuid: GpuUuid
    index: int
    name: str
    handle: Handle | None = None
    fault: Fault | None = None
    detail: str | None = None
    minor: int | None = None
    bus: str | None = None
    links: tuple[Link, ...] = ()
    """The fields from here on are read by `links` when the GPUs are listed."""
    numa_node: int | None = None
    cpus: str | None = None

    @property
    def is_identified(self) -> bool:
        """Whether the driver has ever reported this GPU's UUID."""
        return not self.uuid.startswith(_UNKNOWN)

    def unread(self, fault: Fault, detail: str) -> GpuReading:
        """Return a reading with nothing but the identity of the GPU."""
        return GpuReading(
            self.uuid, self.index, self.name,
            fault=fault, detail=detail, minor=self.minor, bus=self.bus,
            links=self.links, numa_node=self.numa_node, cpus=self.cpus,
        )  # fmt: skip


def list_devices() -> tuple[Device, ...]:
    """Return every GPU of the driver by index, including those that do not answer.

    Raises:
        NvmlFailure: the driver does not report how many there are.
    """
    found: dict[GpuUuid, Device] = {}
    for index in range(int(nvml_binding.call("nvmlDeviceGetCount"))):
        device = _identify(index)
        if (other := found.get(device.uuid)) is not None:
            # Two GPUs with one UUID cannot be leased separately.
            detail = f"the driver reports the UUID of GPU {other.index} for it"
            device = replace(_unidentified(index), fault=Fault.UNREADABLE, detail=detail)
        found[device.uuid] = device
    return tuple(found.values())


def _identify(index: int) -> Device:
    unidentified = _unidentified(index)
    try:
        handle = nvml_binding.call("nvmlDeviceGetHandleByIndex", index)
        uuid = nvml_binding.ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            # It can be read, but its lease could not be named. That does not pass, as a fault may.
            named = replace(unidentified, name=_UNNAMED, handle=handle, detail=_NO_UUID)
            return complete(named)
        return complete(Device(GpuUuid(str(uuid)), index, _UNNAMED, handle))
    except GpuLost as failure:
        return replace(unidentified, fault=Fault.LOST, detail=str(failure))
    except DriverGone:
        raise
    except NvmlFailure as failure:
        return replace(unidentified, fault=Fault.UNREADABLE, detail=str(failure))


def complete(device: Device) -> Device:
    """Return `device` with its name, minor number and PCI address, if the driver reports them.

    A call may have failed when the GPUs were listed, which happens once in a session.

    Raises:
        GpuLost, DriverGone: the GPU cannot be read.
    """
    if device.name == _UNNAMED:
        name = nvml_binding.ask_or_none("nvmlDeviceGetName", device.handle)
        device = replace(device, name=str(name or _UNNAMED))
    if device.minor is None:
        minor = nvml_binding.ask_or_none("nvmlDeviceGetMinorNumber", device.handle)
        device = replace(device, minor=None if minor is None else int(minor))
    if device.bus is None:
        device = replace(device, bus=_bus(device))
    return device


def _bus(device: Device) -> str | None:
    """Return the PCI address of a GPU."""
    found = nvml_binding.ask_or_none("nvmlDeviceGetPciInfo", device.handle)
    return None if found is None else pci_address(found)


def pci_address(found: Any) -> str:
    """Return the address in NVML's PCI info, with a domain of four digits where that is enough."""
    text = found.busId.decode(errors="replace") if isinstance(found.busId, bytes) else found.busId
    domain, _, rest = str(text).lower().partition(":")
    return f"{domain[4:] if domain.startswith('0000') and len(domain) == 8 else domain}:{rest}"


def _unidentified(index: int) -> Device:
    return Device(GpuUuid(f"{_UNKNOWN}{index}"), index, "unknown GPU")


def match(known: Sequence[Device], found: Sequence[Device]) -> tuple[Device, ...]:
    """Return the GPUs in `found`, and those in `known` that the driver no longer lists."""
    present = {device.uuid for device in found}
    absent = [device for device in known if device.is_identified and device.uuid not in present]
    devices = [
        device if device.is_identified else _identify_by_index(device, absent) for device in found
    ]
    matched = {device.uuid for device in devices}
    devices += [
        replace(device, handle=None, fault=Fault.LOST, detail=_NO_LONGER_LISTED)
        for device in absent
        if device.uuid not in matched
    ]
    return by_index(devices)


def by_index(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return `devices` sorted by index, then UUID."""
    return tuple(sorted(devices, key=lambda device: (device.index, device.uuid)))


def _identify_by_index(device: Device, absent: Sequence[Device]) -> Device:
    """Give a GPU that reports no UUID the identity of the missing GPU with its index."""
    for known in absent:
        if known.index == device.index:
            return replace(known, handle=None, fault=device.fault, detail=device.detail)
    return device
