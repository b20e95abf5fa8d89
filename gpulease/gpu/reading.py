"""Reads one GPU and its MIG devices through NVML: each value with its fallbacks, or as unknown.

Handles known driver bugs in memory sizes and process lists. Knows nothing of threads or of other
GPUs. The list of MIG devices is read every time: an admin may partition a GPU differently at any
time.

The utilization of each process is read only where the value for the whole GPU leaves it open: the
GPU computes, and several processes are on it. Sources: NVML's reference for
nvmlDeviceGetProcessUtilization; rust-nvml/nvml-wrapper #56 (no samples are reported as an error);
Syllo/nvtop #110 (invalid samples on some drivers).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpulease.domain.gpu import ComputeMode, Fault, GpuReading, GpuUuid, ProcessReading
from gpulease.gpu import nvml_binding, nvml_errors
from gpulease.gpu.devices import Device, complete
from gpulease.gpu.nvml_binding import Handle
from gpulease.gpu.nvml_errors import DriverGone, GpuLost, NvmlFailure
from gpulease.units import GIB
from gpulease.wire.text import most_of_driver

_ALL_SAMPLES = 0
"""The start of all samples that the driver keeps, which is seconds to a minute."""
_UTILIZATIONS = ("smUtil", "memUtil", "encUtil", "decUtil")


def _with_utilization(
    handle: Handle, processes: Sequence[ProcessReading], utilization: int | None
) -> tuple[ProcessReading, ...]:
    """Return `processes` with the utilization of each in percent, if the driver reports it.

    `utilization` is that of the whole GPU.
    """
    if not utilization or len(processes) < 2:
        return tuple(processes)
    samples = nvml_binding.ask_or_none("nvmlDeviceGetProcessUtilization", handle, _ALL_SAMPLES)
    if not samples or not all(_is_sane(sample) for sample in samples):
        return tuple(processes)
    busy: dict[int, int] = {}
    for sample in samples:
        most = max(int(getattr(sample, figure)) for figure in _UTILIZATIONS)
        busy[int(sample.pid)] = max(most, busy.get(int(sample.pid), 0))
    # Only processes that computed have samples. If these are not the listed processes, as in
    # another pid namespace, the samples do not show that the listed ones were idle.
    listed = {process.pid for process in processes}
    if not any(busy.values()) or any(share and pid not in listed for pid, share in busy.items()):
        return tuple(processes)
    return tuple(replace(process, utilization=busy.get(process.pid, 0)) for process in processes)


def _is_sane(sample: Any) -> bool:
    return int(sample.pid) > 0 and all(int(getattr(sample, each)) <= 100 for each in _UTILIZATIONS)


_NO_TOTAL = "the driver reports no valid memory size (unified memory?), so it cannot be leased"
_LARGEST_GPU = 2**44
"""Bytes (16 TiB). A larger size is a driver bug, and must not be leased."""
_COMPUTE_MODES = {
    0: ComputeMode.DEFAULT,
    1: ComputeMode.EXCLUSIVE_PROCESS,  # exclusive thread: obsolete, and at least as narrow
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}
_LARGEST_PID = 2**22
"""The kernel's limit for kernel.pid_max."""


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int | None = None
    used: int | None = None
    reserved: int | None = None


def read_gpu(device: Device, *, is_mig_device: bool = False) -> GpuReading:
    """Read every value of `device`; those that the driver does not report are None.

    A MIG device is not asked for its MIG mode: the driver may answer with that of its GPU.

    Raises:
        DriverGone: neither this GPU nor any other can be read.
    """
    if device.handle is None:
        return device.unread(device.fault or Fault.UNREADABLE, device.detail or "it has no handle")
    try:
        return _read(device, device.handle, is_mig_device)
    except GpuLost as failure:
        # If the GPU itself is lost, its next reading shows that, and its MIG devices follow.
        return device.unread(Fault.UNREADABLE if is_mig_device else Fault.LOST, str(failure))
    except DriverGone:
        raise
    except NvmlFailure as failure:
        return device.unread(Fault.UNREADABLE, str(failure))


def _read(device: Device, handle: Handle, is_mig_device: bool) -> GpuReading:
    if not is_mig_device:
        device = complete(device)
    mig = None if is_mig_device else nvml_binding.ask("nvmlDeviceGetMigMode", handle)
    mig_mode = mig is not None and int(mig[0]) == 1
    memory = _read_memory(handle, is_leased=not mig_mode)
    if not device.is_identified:
        memory = _Memory()
    detail = device.detail
    if detail is None and memory.total is None and not mig_mode:
        detail = _NO_TOTAL
    utilization = _read_utilization(handle)
    processes = _read_processes(handle, memory.total)
    if not processes and _is_held(memory):
        processes = None
    return GpuReading(
        uuid=device.uuid,
        index=device.index,
        name=device.name,
        total=None if mig_mode else memory.total,
        used=memory.used,
        reserved=memory.reserved,
        processes=processes and _with_utilization(handle, processes, utilization),
        utilization=utilization,
        # A MIG device is shown with the temperature of its GPU.
        temperature=None if is_mig_device else _read_temperature(handle),
        power=None if is_mig_device else _read_watts(handle, "nvmlDeviceGetPowerUsage"),
        power_limit=None if is_mig_device else _read_watts(handle, *_POWER_LIMITS),
        detail=detail,
        minor=device.minor,
        bus=device.bus,
        links=device.links,
        numa_node=device.numa_node,
        cpus=device.cpus,
        mig_mode=mig_mode,
        compute_mode=_read_compute_mode(handle),
    )


def _read_compute_mode(handle: Handle) -> ComputeMode | None:
    """Return the compute mode: the default if unsupported, None if there is no answer now.

    In MIG mode only the MIG devices have one (NVML, nvmlDeviceGetComputeMode).
    """
    try:
        return _COMPUTE_MODES.get(int(nvml_binding.call("nvmlDeviceGetComputeMode", handle)))
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure as failure:
        has_none = failure.is_not_supported or failure.code == nvml_errors.INVALID_ARGUMENT
        return ComputeMode.DEFAULT if has_none else None


def _read_memory(handle: Handle, is_leased: bool) -> _Memory:
    """Read the memory sizes; they may be unknown for a GPU that is not leased itself."""
    try:
        return _read_memory_info(handle)
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        if is_leased:
            raise
        return _Memory()


def _read_memory_info(handle: Handle) -> _Memory:
    """Read version 2 of the memory info, else version 1, which has no `reserved`.

    Version 1 is used only where version 2 is unsupported: without `reserved`, too much would be
    leased.
    """
    if nvml_binding.MEMORY_V2 is not None:
        answer = nvml_binding.ask("nvmlDeviceGetMemoryInfo", handle, nvml_binding.MEMORY_V2)
        if answer is not None:
            return _memory(answer, reserved=int(answer.reserved))
    answer = nvml_binding.ask("nvmlDeviceGetMemoryInfo", handle)
    return _Memory() if answer is None else _memory(answer, reserved=None)


def _memory(answer: Any, reserved: int | None) -> _Memory:
    """Return the sizes that are plausible."""
    total = _size(int(answer.total), at_most=_LARGEST_GPU)
    if reserved == nvml_binding.NOT_AVAILABLE:
        reserved = None
    # Without what the driver reserves, too much would be leased.
    if not total or (reserved is not None and reserved > total):
        return _Memory()
    return _Memory(total, _size(int(answer.used), at_most=total), reserved)


def _size(size: int, at_most: int | None) -> int | None:
    if size == nvml_binding.NOT_AVAILABLE or (at_most is not None and size > at_most):
        return None
    return size


def _is_held(memory: _Memory) -> bool:
    """Tell whether processes hold memory: more than the driver alone does.

    WSL lists no process. A list without processes then says nothing about them.
    """
    if memory.used is None or memory.total is None:
        return False
    # Version 1 counts what the driver reserves as used, some hundred MiB.
    of_driver = GIB if memory.reserved is None else most_of_driver(memory.total)
    return memory.used > of_driver


def _read_utilization(handle: Handle) -> int | None:
    answer = nvml_binding.ask_or_none("nvmlDeviceGetUtilizationRates", handle)
    return int(answer.gpu) if answer is not None and answer.gpu <= 100 else None


def _read_temperature(handle: Handle) -> int | None:
    # CUDA 14 will remove the first; present bindings and drivers may lack the second.
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
        answer = nvml_binding.ask_or_none(name, handle, nvml_binding.TEMPERATURE_OF_GPU)
        if answer is not None:
            return int(answer) if answer < 1000 else None
    return None


_POWER_LIMITS = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
"""The first is the lowest of all limits in force; not every GPU reports it."""
_MOST_WATTS = 10_000


def _read_watts(handle: Handle, *names: str) -> float | None:
    """Return the answer of the first function with a plausible one; NVML reports milliwatts."""
    for name in names:
        answer = nvml_binding.ask_or_none(name, handle)
        if answer is not None and answer < _MOST_WATTS * 1000:
            return round(int(answer) / 1000, 1)
    return None


def _read_processes(handle: Handle, total: int | None) -> tuple[ProcessReading, ...] | None:
    """Merge the compute and the graphics processes; a process in both lists counts once.

    Unknown without the compute list. Without a graphics list, graphics memory counts as used by no
    process.
    """
    compute = _read_list("nvmlDeviceGetComputeRunningProcesses", handle, total, default=None)
    graphics = _read_list("nvmlDeviceGetGraphicsRunningProcesses", handle, total, default=[])
    if compute is None or graphics is None:
        return None
    held: dict[int, int | None] = {}
    for pid, memory in compute + graphics:
        held[pid] = _larger(held.get(pid), memory)
    computing = {pid for pid, _ in compute}
    return tuple(
        ProcessReading(pid, held[pid], graphics=pid not in computing) for pid in sorted(held)
    )


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


_List = list[tuple[int, int | None]]


def _read_list(name: str, handle: Handle, total: int | None, default: _List | None) -> _List | None:
    """Return pids and bytes by the newest function with a plausible answer, or None.

    Some drivers of the 530 series write longer structs than the binding expects, so that all but
    the first are misread; their older function is correct. Return `default` if the driver has no
    such function.

    Raises:
        NvmlFailure: there is no answer now. The GPU is then unreadable: without the list, unmanaged
            memory could pass for that of a job which uses less than its lease.
    """
    versions = [
        f"{name}{version}" for version in ("_v3", "_v2") if nvml_binding.has(f"{name}{version}")
    ]
    exists, failure = False, None
    for version in versions or [name]:
        try:
            answer = _ask_list(version, handle)
        except (GpuLost, DriverGone):
            raise
        except NvmlFailure as error:
            failure = error
            continue
        exists |= answer is not None
        if answer is not None and all(0 < int(process.pid) <= _LARGEST_PID for process in answer):
            return [(int(process.pid), _held(process, total)) for process in answer]
    if failure is not None and failure.code != nvml_errors.NO_PERMISSION:
        raise failure
    return None if exists or failure else default


def _ask_list(version: str, handle: Handle) -> Any:
    try:
        return nvml_binding.ask(version, handle)
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        # A process that starts between the binding's two calls overflows its array: ask again.
        return nvml_binding.ask(version, handle)


def _held(process: Any, total: int | None) -> int | None:
    memory = process.usedGpuMemory
    return None if memory is None else _size(int(memory), at_most=total)


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
