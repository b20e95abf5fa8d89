"""Reads one GPU through NVML: each figure with its fallbacks, and unknown where there is none.

Knows what drivers get wrong about memory and process lists; knows nothing of threads or of other
GPUs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulease.domain.memory import Fault, GpuReading, ProcessReading
from gpulease.gpu import binding
from gpulease.gpu.activity import told_apart
from gpulease.gpu.binding import DriverGone, GpuLost, Handle, NvmlFailure
from gpulease.gpu.devices import Device

_NO_TOTAL = "the driver tells no memory size for this GPU (unified memory?), so it cannot be leased"
_LARGEST_GPU = 2**44
"""Bytes; what is larger than 16 TiB is no size of this decade, and would be leased."""
_LARGEST_PID = 2**22
"""The kernel's own bound on kernel.pid_max."""


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int | None = None
    used: int | None = None
    reserved: int | None = None


def read_gpu(device: Device, *, is_part: bool = False) -> GpuReading:
    """Read every figure of `device`; what the driver does not tell is None.

    `is_part` says that it is a MIG device. Those are not divided, and what a driver says of the
    mode of one may be that of its GPU.

    Raises:
        DriverGone: neither this GPU nor any other can be read.
    """
    if device.handle is None:
        return device.unread(device.fault or Fault.UNREADABLE, device.detail or "it has no handle")
    try:
        return _read(device, device.handle, is_part)
    except GpuLost as failure:
        return device.unread(Fault.LOST, str(failure))
    except DriverGone:
        raise
    except NvmlFailure as failure:
        return device.unread(Fault.UNREADABLE, str(failure))


def _read(device: Device, handle: Handle, is_part: bool) -> GpuReading:
    memory = _read_memory(handle)
    divided = not is_part and _is_divided(handle)
    detail = _NO_TOTAL if memory.total is None and not divided else None
    utilization = _read_utilization(handle)
    processes = _read_processes(handle, memory.total)
    return GpuReading(
        uuid=device.uuid,
        index=device.index,
        name=device.name,
        total=None if divided else memory.total,
        used=memory.used,
        reserved=memory.reserved,
        processes=processes and told_apart(handle, processes, utilization),
        utilization=utilization,
        temperature=_read_temperature(handle),
        detail=detail,
        minor=device.minor,
        divided=divided,
    )


def _read_memory(handle: Handle) -> _Memory:
    """Read the second version of the memory figures, else the first, which has no `reserved`."""
    if binding.MEMORY_V2 is not None:
        answer = binding.ask("nvmlDeviceGetMemoryInfo", handle, binding.MEMORY_V2)
        if answer is not None:
            return _memory(answer, reserved=int(answer.reserved))
    try:
        return _memory(binding.call("nvmlDeviceGetMemoryInfo", handle), reserved=None)
    except NvmlFailure as failure:
        if failure.is_no_such_figure:
            return _Memory()
        raise


def _memory(answer: Any, reserved: int | None) -> _Memory:
    """Take over the sizes that can be true."""
    total = _size(int(answer.total), at_most=_LARGEST_GPU)
    if not total:
        return _Memory()
    used = _size(int(answer.used), at_most=total)
    if reserved is not None:
        reserved = _size(reserved, at_most=total)
    return _Memory(total, used, reserved)


def _size(size: int, at_most: int | None) -> int | None:
    if size == binding.NOT_AVAILABLE or (at_most is not None and size > at_most):
        return None
    return size


def _is_divided(handle: Handle) -> bool:
    answer = binding.ask("nvmlDeviceGetMigMode", handle)
    return answer is not None and int(answer[0]) == 1


def _read_utilization(handle: Handle) -> int | None:
    answer = binding.ask("nvmlDeviceGetUtilizationRates", handle)
    return int(answer.gpu) if answer is not None and answer.gpu <= 100 else None


def _read_temperature(handle: Handle) -> int | None:
    # The first is to go with CUDA 14; bindings and drivers of today may not have the second.
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
        answer = binding.ask(name, handle, binding.TEMPERATURE_OF_GPU)
        if answer is not None:
            return int(answer) if answer < 1000 else None
    return None


def _read_processes(handle: Handle, total: int | None) -> tuple[ProcessReading, ...] | None:
    """Merge the processes that compute with those that draw; a process in both counts once.

    Without the first list the answer is unknown. Without the second it is the first: what draws
    then counts as memory in use with no process, which errs on the safe side.
    """
    compute = _read_list("nvmlDeviceGetComputeRunningProcesses", handle, total)
    if compute is None:
        return None
    graphics = _read_list("nvmlDeviceGetGraphicsRunningProcesses", handle, total) or []
    held: dict[int, int | None] = {}
    for pid, memory in compute + graphics:
        held[pid] = _larger(held.get(pid), memory)
    return tuple(ProcessReading(pid, held[pid]) for pid in sorted(held))


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _read_list(name: str, handle: Handle, total: int | None) -> list[tuple[int, int | None]] | None:
    """Return pids and sizes by the newest function whose answer can be true, or None.

    Some drivers of the 530 series are said to write records longer than the binding expects, so
    that all but the first are misread; their older function is right.
    """
    versions = [f"{name}{version}" for version in ("_v3", "_v2") if binding.has(f"{name}{version}")]
    highest = _highest_pid()
    for version in versions or [name]:
        answer = _ask_list(version, handle)
        if answer is not None and all(0 < int(process.pid) <= highest for process in answer):
            return [(int(process.pid), _held(process, total)) for process in answer]
    return None


def _ask_list(version: str, handle: Handle) -> Any:
    # A process that starts between the binding's two calls can overfill its array: ask again.
    answer = binding.ask(version, handle)
    return binding.ask(version, handle) if answer is None else answer


def _held(process: Any, total: int | None) -> int | None:
    memory = process.usedGpuMemory
    return None if memory is None else _size(int(memory), at_most=total)


def _highest_pid() -> int:
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _LARGEST_PID
