"""Reads a GPU and the MIG devices on it, each as a GPU reading.

The list of MIG devices is read every time: an admin may partition a GPU differently at any time.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.gpu import nvml_binding, nvml_errors
from gpulease.gpu.devices import Device
from gpulease.gpu.nvml_binding import Handle
from gpulease.gpu.nvml_errors import DriverGone, GpuLost, NvmlFailure
from gpulease.gpu.reading import read_gpu

_CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
_MOST_MIG_DEVICES = 64
"""More than any GPU has. Bounds the loop if the driver reports a nonsensical count."""


def read_with_mig_devices(device: Device) -> tuple[GpuReading, ...]:
    """Return the reading of `device`, then those of its MIG devices by index.

    Raises:
        DriverGone: neither this GPU nor any other can be read.
    """
    gpu = read_gpu(device)
    if not gpu.mig_mode or device.handle is None:
        return (gpu,)
    try:
        found = tuple(_mig_devices(device, device.handle, gpu))
    except GpuLost as failure:
        return (device.unread(Fault.LOST, str(failure)),)
    except DriverGone:
        raise
    except NvmlFailure as failure:
        # The list of MIG devices is unknown now, so those seen before become unreadable.
        return (device.unread(Fault.UNREADABLE, str(failure)),)
    if found and all(each.processes is not None for each in found):
        # Every process is on a MIG device and listed there.
        gpu = replace(gpu, processes=())
    return (replace(gpu, detail=_detail(len(found))), *found)


def _detail(count: int) -> str:
    if not count:
        return "MIG is enabled, but there is no MIG device to lease"
    devices = "MIG device is" if count == 1 else f"{count} MIG devices are"
    return f"divided by MIG: its {devices} leased, not the GPU itself"


def _mig_devices(device: Device, handle: Handle, gpu: GpuReading) -> Iterator[GpuReading]:
    """Yield the reading of each MIG device.

    Raises:
        NvmlFailure: the driver does not list them now.
    """
    count = nvml_binding.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    for index in range(min(int(count or 0), _MOST_MIG_DEVICES)):
        mig_handle = _mig_handle(handle, index)
        if mig_handle is None:
            continue
        uuid = GpuUuid(str(nvml_binding.call("nvmlDeviceGetUUID", mig_handle)))
        name = nvml_binding.ask_or_none("nvmlDeviceGetName", mig_handle)
        known = Device(
            uuid, device.index, str(name or "MIG device"), mig_handle, minor=gpu.minor, bus=gpu.bus
        )
        yield replace(
            read_gpu(known, is_mig_device=True),
            parent=device.uuid,
            mig_index=index,
            temperature=gpu.temperature,
            device_nodes=_device_nodes(gpu.minor, mig_handle),
        )


def _mig_handle(handle: Handle, index: int) -> Handle | None:
    """Return the MIG device at `index`, or None where there is none.

    An invalid argument also means an empty index, as in NVIDIA's go-nvlib (VisitMigDevices).

    Raises:
        NvmlFailure: the driver does not answer now.
    """
    try:
        found: Handle = nvml_binding.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
    except NvmlFailure as failure:
        if failure.code in (nvml_errors.NOT_FOUND, nvml_errors.INVALID_ARGUMENT):
            return None
        raise
    return found


def _device_nodes(minor: int | None, mig_handle: Handle) -> tuple[str, ...] | None:
    """Return the device nodes of a MIG device; None where they are not known.

    Source: NVIDIA, "MIG User Guide", "Device Nodes and Capabilities".

    Raises:
        NvmlFailure: the driver does not answer now.
    """
    gpu_instance = nvml_binding.ask("nvmlDeviceGetGpuInstanceId", mig_handle)
    compute_instance = nvml_binding.ask("nvmlDeviceGetComputeInstanceId", mig_handle)
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


def unreadable(
    device: Device, mig_devices: tuple[GpuReading, ...], reading: GpuReading
) -> Iterator[GpuReading]:
    """Yield `reading`, of a GPU that cannot be read, then the same fault for its MIG devices."""
    yield reading
    for each in mig_devices:
        yield GpuReading(
            each.uuid,
            device.index,
            each.name,
            fault=reading.fault,
            detail=reading.detail,
            parent=device.uuid,
            mig_index=each.mig_index,
        )
