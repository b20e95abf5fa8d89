"""Reads one GPU through NVML: each figure with its fallbacks, and unknown where there is none.

Knows what drivers get wrong about memory and process lists; knows nothing of threads or of other
GPUs.

Reads which processes on a GPU computed of late, where the driver tells them apart.

It is asked only where the figure for the whole GPU leaves the question open: something computes,
and there are several processes.

Sources: NVML's reference for nvmlDeviceGetProcessUtilization; the threads rust-nvml/nvml-wrapper
#56 (no samples are told as an error) and Syllo/nvtop #110 (records of nonsense on some drivers).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpulease.domain.gpu import ComputeMode, Fault, GpuReading, ProcessReading
from gpulease.gpu import nvml_binding
from gpulease.gpu.devices import Device, complete
from gpulease.gpu.nvml_binding import DriverGone, GpuLost, Handle, NvmlFailure

_ALL_SAMPLES = 0
"""All that the driver still keeps, of seconds to a minute: who computed then is not idle yet."""
_FIGURES = ("smUtil", "memUtil", "encUtil", "decUtil")


def told_apart(
    handle: Handle, processes: Sequence[ProcessReading], utilization: int | None
) -> tuple[ProcessReading, ...]:
    """Return `processes` with how busy each was, in percent; as they are where there is no telling.

    `utilization` is the one of the whole GPU.
    """
    if not utilization or len(processes) < 2:
        return tuple(processes)
    samples = nvml_binding.ask_or_none("nvmlDeviceGetProcessUtilization", handle, _ALL_SAMPLES)
    if not samples or not all(_is_sane(sample) for sample in samples):
        return tuple(processes)
    busy: dict[int, int] = {}
    for sample in samples:
        most = max(int(getattr(sample, figure)) for figure in _FIGURES)
        busy[int(sample.pid)] = max(most, busy.get(int(sample.pid), 0))
    # There are samples only of those that computed at some time. Where they are not who is listed,
    # as in other pid namespaces, nothing says that those who are listed did not.
    listed = {process.pid for process in processes}
    if not any(busy.values()) or any(share and pid not in listed for pid, share in busy.items()):
        return tuple(processes)
    return tuple(replace(process, utilization=busy.get(process.pid, 0)) for process in processes)


def _is_sane(sample: Any) -> bool:
    return int(sample.pid) > 0 and all(int(getattr(sample, each)) <= 100 for each in _FIGURES)


_NO_TOTAL = "the driver tells no memory size for this GPU (unified memory?), so it cannot be leased"
_LARGEST_GPU = 2**44
"""Bytes; what is larger than 16 TiB is no size of this decade, and would be leased."""
_COMPUTE_MODES = {
    0: ComputeMode.DEFAULT,
    1: ComputeMode.EXCLUSIVE_PROCESS,  # exclusive thread: obsolete, and no wider
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}
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
        # A GPU that is really lost says so itself at the next look, and its parts are lost with it.
        return device.unread(Fault.UNREADABLE if is_part else Fault.LOST, str(failure))
    except DriverGone:
        raise
    except NvmlFailure as failure:
        return device.unread(Fault.UNREADABLE, str(failure))


def _read(device: Device, handle: Handle, is_part: bool) -> GpuReading:
    if not is_part:
        device = complete(device)
    divided = not is_part and _is_divided(handle)
    memory = _read_memory(handle, is_leased=not divided)
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
        # A MIG device is shown with the temperature of its GPU.
        temperature=None if is_part else _read_temperature(handle),
        detail=detail,
        minor=device.minor,
        mig_mode=divided,
        compute_mode=_read_compute_mode(handle),
    )


def _read_compute_mode(handle: Handle) -> ComputeMode | None:
    """Return the default where there are no compute modes, and None where there is no answer now.

    Of a GPU that MIG divides, only its MIG devices have one (nvmlDeviceGetComputeMode).
    """
    try:
        return _COMPUTE_MODES.get(int(nvml_binding.call("nvmlDeviceGetComputeMode", handle)))
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure as failure:
        has_none = failure.is_no_such_figure or failure.code == nvml_binding.INVALID_ARGUMENT
        return ComputeMode.DEFAULT if has_none else None


def _read_memory(handle: Handle, is_leased: bool) -> _Memory:
    """Read the memory figures; those of a GPU that is not leased itself may stay unknown."""
    try:
        return _read_memory_info(handle)
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        if is_leased:
            raise
        return _Memory()


def _read_memory_info(handle: Handle) -> _Memory:
    """Read the second version of the memory figures, else the first, which has no `reserved`.

    The first is asked only where there is no second: without `reserved`, more could be leased.
    """
    if nvml_binding.MEMORY_V2 is not None:
        answer = nvml_binding.ask("nvmlDeviceGetMemoryInfo", handle, nvml_binding.MEMORY_V2)
        if answer is not None:
            return _memory(answer, reserved=int(answer.reserved))
    answer = nvml_binding.ask("nvmlDeviceGetMemoryInfo", handle)
    return _Memory() if answer is None else _memory(answer, reserved=None)


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
    if size == nvml_binding.NOT_AVAILABLE or (at_most is not None and size > at_most):
        return None
    return size


def _is_divided(handle: Handle) -> bool:
    answer = nvml_binding.ask("nvmlDeviceGetMigMode", handle)
    return answer is not None and int(answer[0]) == 1


def _read_utilization(handle: Handle) -> int | None:
    answer = nvml_binding.ask_or_none("nvmlDeviceGetUtilizationRates", handle)
    return int(answer.gpu) if answer is not None and answer.gpu <= 100 else None


def _read_temperature(handle: Handle) -> int | None:
    # The first is to go with CUDA 14; bindings and drivers of today may not have the second.
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
        answer = nvml_binding.ask_or_none(name, handle, nvml_binding.TEMPERATURE_OF_GPU)
        if answer is not None:
            return int(answer) if answer < 1000 else None
    return None


def _read_processes(handle: Handle, total: int | None) -> tuple[ProcessReading, ...] | None:
    """Merge the processes that compute with those that draw; a process in both counts once.

    The answer is unknown without the first list. Where the driver has no second list, what draws
    counts as memory in use with no process.
    """
    compute = _read_list("nvmlDeviceGetComputeRunningProcesses", handle, total, without=None)
    graphics = _read_list("nvmlDeviceGetGraphicsRunningProcesses", handle, total, without=[])
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


def _read_list(name: str, handle: Handle, total: int | None, without: _List | None) -> _List | None:
    """Return pids and sizes by the newest function whose answer can be true, or None.

    Some drivers of the 530 series are said to write records longer than the binding expects, so
    that all but the first are misread; their older function is right. Where the driver has no such
    function at all, the answer is `without`.

    Raises:
        NvmlFailure: there is no answer at this moment. The GPU is then unreadable: without the list
            a stranger's memory would pass for that of a job which uses less than its lease.
    """
    versions = [
        f"{name}{version}" for version in ("_v3", "_v2") if nvml_binding.has(f"{name}{version}")
    ]
    highest = _highest_pid()
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
        if answer is not None and all(0 < int(process.pid) <= highest for process in answer):
            return [(int(process.pid), _held(process, total)) for process in answer]
    if failure is not None and failure.code != nvml_binding.NO_PERMISSION:
        raise failure
    return None if exists or failure else without


def _ask_list(version: str, handle: Handle) -> Any:
    try:
        return nvml_binding.ask(version, handle)
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        # A process that starts between the binding's two calls can overfill its array: ask again.
        return nvml_binding.ask(version, handle)


def _held(process: Any, total: int | None) -> int | None:
    memory = process.usedGpuMemory
    return None if memory is None else _size(int(memory), at_most=total)


def _highest_pid() -> int:
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _LARGEST_PID
