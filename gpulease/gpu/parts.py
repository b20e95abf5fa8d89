"""Reads a GPU together with the MIG devices that it is divided into, each like a GPU of its own.

Which there are is asked anew at each look: an admin may divide a GPU in another way at any time.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpulease.domain.memory import Fault, GpuReading, GpuUuid
from gpulease.gpu import binding
from gpulease.gpu.binding import DriverGone, GpuLost, Handle, NvmlFailure
from gpulease.gpu.devices import Device
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
    if not whole.divided or device.handle is None:
        return (whole,)
    try:
        parts = tuple(_parts(device, device.handle, whole))
    except GpuLost as failure:
        return (device.unread(Fault.LOST, str(failure)),)
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
    count = binding.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    for place in range(min(int(count or 0), _MOST_PARTS)):
        try:
            part = binding.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            uuid = GpuUuid(str(binding.call("nvmlDeviceGetUUID", part)))
        except (GpuLost, DriverGone):
            raise
        except NvmlFailure:
            # There is none at this place; or none that is told, which cannot be leased either.
            continue
        name = binding.ask("nvmlDeviceGetName", part)
        known = Device(uuid, device.index, str(name or "MIG device"), part, minor=device.minor)
        yield replace(
            read_gpu(known, is_part=True),
            parent=device.uuid,
            place=place,
            temperature=whole.temperature,
            access=_access(device, part),
        )


def _access(device: Device, part: Handle) -> tuple[str, ...] | None:
    """Return the nodes that open a MIG device; None where they cannot be found out.

    Source: NVIDIA, "MIG User Guide", "Device Nodes and Capabilities".
    """
    gpu_instance = binding.ask("nvmlDeviceGetGpuInstanceId", part)
    compute_instance = binding.ask("nvmlDeviceGetComputeInstanceId", part)
    if None in (gpu_instance, compute_instance, device.minor):
        return None
    mig = _CAPABILITIES / f"gpu{device.minor}" / "mig" / f"gi{int(gpu_instance)}"
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
            place=part.place,
        )
