"""Reads a GPU together with the MIG devices that it is divided into, each like a GPU of its own.

Which there are is asked anew at each look: an admin may divide a GPU in another way at any time.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.gpu import nvml_binding
from gpulease.gpu.devices import Device
from gpulease.gpu.nvml_binding import DriverGone, GpuLost, Handle, NvmlFailure
from gpulease.gpu.reading import read_gpu

_CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
_MOST_PARTS = 64
"""More than any GPU is divided into, so that a nonsensical number costs no second."""


def read_with_parts(device: Device) -> tuple[GpuReading, ...]:
    """Read `device`, and after it its MIG devices by their place on it.

    Raises:
        DriverGone: neither this GPU nor any other can be read.
    """
    whole = read_gpu(device)
    if not whole.mig_mode or device.handle is None:
        return (whole,)
    try:
        parts = tuple(_parts(device, device.handle, whole))
    except GpuLost as failure:
        return (device.unread(Fault.LOST, str(failure)),)
    except DriverGone:
        raise
    except NvmlFailure as failure:
        # Which MIG devices there are is not known now: those that were known are unreadable.
        return (device.unread(Fault.UNREADABLE, str(failure)),)
    if parts and all(part.processes is not None for part in parts):
        # Each is on one of the parts, and is shown there.
        whole = replace(whole, processes=())
    one = len(parts) == 1
    count = "MIG device is" if one else f"{len(parts)} MIG devices are"
    detail = f"divided by MIG: its {count} leased, not the GPU itself"
    if not parts:
        detail = "MIG is enabled, and there is no MIG device on it that could be leased"
    return (replace(whole, detail=detail), *parts)


def _parts(device: Device, handle: Handle, whole: GpuReading) -> Iterator[GpuReading]:
    """Yield the reading of each MIG device.

    Raises:
        NvmlFailure: the driver does not say now which there are.
    """
    count = nvml_binding.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    for place in range(min(int(count or 0), _MOST_PARTS)):
        part = _part_at(handle, place)
        if part is None:
            continue
        uuid = GpuUuid(str(nvml_binding.call("nvmlDeviceGetUUID", part)))
        name = nvml_binding.ask_or_none("nvmlDeviceGetName", part)
        known = Device(uuid, device.index, str(name or "MIG device"), part, minor=whole.minor)
        yield replace(
            read_gpu(known, is_part=True),
            parent=device.uuid,
            mig_index=place,
            temperature=whole.temperature,
            device_nodes=_access(whole.minor, part),
        )


def _part_at(handle: Handle, place: int) -> Handle | None:
    """Return the MIG device at `place`, or None where there is none.

    NVIDIA's own go-nvlib (VisitMigDevices) takes an invalid argument for an empty place, too.

    Raises:
        NvmlFailure: the driver does not say now.
    """
    try:
        part: Handle = nvml_binding.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
    except NvmlFailure as failure:
        if failure.code in (nvml_binding.NOT_FOUND, nvml_binding.INVALID_ARGUMENT):
            return None
        raise
    return part


def _access(minor: int | None, part: Handle) -> tuple[str, ...] | None:
    """Return the nodes that open a MIG device; None where they cannot be found out.

    Source: NVIDIA, "MIG User Guide", "Device Nodes and Capabilities".

    Raises:
        NvmlFailure: the driver does not say now.
    """
    gpu_instance = nvml_binding.ask("nvmlDeviceGetGpuInstanceId", part)
    compute_instance = nvml_binding.ask("nvmlDeviceGetComputeInstanceId", part)
    if None in (gpu_instance, compute_instance, minor):
        return None
    mig = _CAPABILITIES / f"gpu{minor}" / "mig" / f"gi{int(gpu_instance)}"
    nodes = (_node(mig / "access"), _node(mig / f"ci{int(compute_instance)}" / "access"))
    return tuple(node for node in nodes if node) if all(nodes) else None


def _node(access: Path) -> str | None:
    try:
        words = access.read_text(encoding="ascii").split()
        return f"/dev/nvidia-caps/nvidia-cap{int(words[words.index('DeviceFileMinor:') + 1])}"
    except (OSError, ValueError, LookupError):
        return None


def unread(device: Device, parts: tuple[GpuReading, ...], why: GpuReading) -> Iterator[GpuReading]:
    """Yield the reading `why` of a GPU that cannot be read, and what that makes of its parts."""
    yield why
    for part in parts:
        yield GpuReading(
            part.uuid,
            device.index,
            part.name,
            fault=why.fault,
            detail=why.detail,
            parent=device.uuid,
            mig_index=part.mig_index,
        )
