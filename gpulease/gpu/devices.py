"""Which GPUs the driver lists, and which of them are the ones that were known before.

A GPU is its UUID: its index may change whenever the driver is initialised, and a GPU that has
fallen off the bus keeps the identity it had.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.gpu import nvml_binding
from gpulease.gpu.nvml_binding import DriverGone, GpuLost, Handle, NvmlFailure

_UNKNOWN = "unknown-"
_UNNAMED = "unnamed GPU"
_NO_LONGER_LISTED = "the driver no longer lists this GPU"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of this machine; without a `handle` it cannot be read, for the `fault` given."""

    uuid: GpuUuid
    index: int
    name: str
    handle: Handle | None = None
    fault: Fault | None = None
    detail: str | None = None
    minor: int | None = None

    @property
    def is_identified(self) -> bool:
        """Say whether the driver has ever told this GPU's UUID."""
        return not self.uuid.startswith(_UNKNOWN)

    def unread(self, fault: Fault, detail: str) -> GpuReading:
        """Return the reading of a GPU of which nothing but its identity is known."""
        return GpuReading(self.uuid, self.index, self.name, fault=fault, detail=detail)


def list_devices() -> tuple[Device, ...]:
    """Ask the driver for every GPU, by index; one that does not answer stands among them.

    Raises:
        NvmlFailure: the driver does not even tell how many there are.
    """
    found: dict[GpuUuid, Device] = {}
    for index in range(int(nvml_binding.call("nvmlDeviceGetCount"))):
        device = _identify(index)
        if (other := found.get(device.uuid)) is not None:
            # Two of one name cannot be leased apart.
            detail = f"the driver says that it has the UUID of GPU {other.index}"
            device = replace(_nameless(index), fault=Fault.UNREADABLE, detail=detail)
        found[device.uuid] = device
    return tuple(found.values())


def _identify(index: int) -> Device:
    nameless = _nameless(index)
    try:
        handle = nvml_binding.call("nvmlDeviceGetHandleByIndex", index)
        uuid = GpuUuid(str(nvml_binding.call("nvmlDeviceGetUUID", handle)))
        return complete(Device(uuid, index, _UNNAMED, handle))
    except GpuLost as failure:
        return replace(nameless, fault=Fault.LOST, detail=str(failure))
    except DriverGone:
        raise
    except NvmlFailure as failure:
        return replace(nameless, fault=Fault.UNREADABLE, detail=str(failure))


def complete(device: Device) -> Device:
    """Return `device` with its name and minor number, asking for those that are not known yet.

    Either call may have failed when the GPUs were listed, which happens once in a session.

    Raises:
        GpuLost, DriverGone: the GPU cannot be read.
    """
    if device.name == _UNNAMED:
        name = nvml_binding.ask_or_none("nvmlDeviceGetName", device.handle)
        device = replace(device, name=str(name or _UNNAMED))
    if device.minor is None:
        minor = nvml_binding.ask_or_none("nvmlDeviceGetMinorNumber", device.handle)
        device = replace(device, minor=None if minor is None else int(minor))
    return device


def _nameless(index: int) -> Device:
    return Device(GpuUuid(f"{_UNKNOWN}{index}"), index, "unknown GPU")


def match(known: Sequence[Device], found: Sequence[Device]) -> tuple[Device, ...]:
    """Return the GPUs in `found`, and those in `known` that the driver cannot show any more."""
    present = {device.uuid for device in found}
    absent = [device for device in known if device.is_identified and device.uuid not in present]
    devices = [device if device.is_identified else _recognise(device, absent) for device in found]
    recognised = {device.uuid for device in devices}
    devices += [
        replace(device, handle=None, fault=Fault.LOST, detail=_NO_LONGER_LISTED)
        for device in absent
        if device.uuid not in recognised
    ]
    return in_order(devices)


def in_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return `devices` as people count them."""
    return tuple(sorted(devices, key=lambda device: (device.index, device.uuid)))


def _recognise(device: Device, absent: Sequence[Device]) -> Device:
    """Give a GPU that does not tell its UUID the identity of the one absent from its place."""
    for before in absent:
        if before.index == device.index:
            return replace(before, handle=None, fault=device.fault, detail=device.detail)
    return device
