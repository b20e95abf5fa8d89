"""Calls NVML's functions by name, and settles the differences between releases of the binding.

Failures are translated by `nvml_errors`. This module knows nothing of deadlines or readings; it
notes the end of each call for callers that have a deadline.
"""

import ctypes
import os
from pathlib import Path
from typing import Any, NewType

import pynvml

from gpulease.call_thread import note_progress
from gpulease.gpu.nvml_errors import (
    BINDING_ERRORS,
    DriverGone,
    DriverReplaced,
    GpuLost,
    NvmlFailure,
    OldBinding,
    from_binding,
    from_code,
)

Handle = NewType("Handle", object)
"""NVML's handle of a GPU; valid until the session ends."""

NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE: what NVML writes for a size that is not known."""
MEMORY_V2: int | None = getattr(pynvml, "nvmlMemory_v2", None)
"""The version that reports the memory reserved by the driver; None in old bindings."""

NO_LIMIT = 2**64 - 1
"""NVML_DEVICE_MEMORY_LIMIT_MAX: the hard limit of a cgroup without a limit."""

TEMPERATURE_OF_GPU = int(pynvml.NVML_TEMPERATURE_GPU)

XID_EVENT = int(pynvml.nvmlEventTypeXidCriticalError)
BY_NVLINK = int(pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
"""What nvmlDeviceGetP2PStatus is asked about; POSSIBLE is its answer where two GPUs can do it."""
POSSIBLE = int(pynvml.NVML_P2P_STATUS_OK)
NEAREST_NODE = int(pynvml.NVML_AFFINITY_SCOPE_NODE)
RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older releases of the binding do not define."""
UNCORRECTED_SINCE_LOADED = (
    int(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    int(pynvml.NVML_VOLATILE_ECC),
)
"""The arguments of nvmlDeviceGetTotalEccErrors."""
EVENT_WAIT = "nvmlEventSetWait_v2" if hasattr(pynvml, "nvmlEventSetWait_v2") else "nvmlEventSetWait"

_LIBRARY = "libnvidia-ml.so"
_MOST_SESSIONS = 64


def call(name: str, *arguments: object) -> Any:
    """Call the NVML function `name` and return its answer.

    Raises:
        NvmlFailure: or a subclass; also for a function that the binding or the library lacks.
    """
    function = getattr(pynvml, name, None)
    if function is None:
        raise OldBinding(name)
    try:
        answer = function(*arguments)
        # Old releases, such as 11.450, return text as bytes.
        return answer.decode() if isinstance(answer, bytes) else answer
    except BINDING_ERRORS as error:
        raise from_binding(error) from error
    finally:
        note_progress()


def ask(name: str, *arguments: object) -> Any:
    """Call `name`, or return None where the GPU or the driver does not support it.

    Raises:
        NvmlFailure: there is no answer now. The caller treats the value as unknown, never as zero
            or unsupported.
    """
    try:
        return call(name, *arguments)
    except NvmlFailure as failure:
        if failure.is_not_supported:
            return None
        raise


def ask_or_none(name: str, *arguments: object) -> Any:
    """Call `name`, or return None where there is no answer, for any reason.

    Only for values that are displayed: no decision may depend on the reason.

    Raises:
        GpuLost, DriverGone: later calls would fail as well.
    """
    try:
        return call(name, *arguments)
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        return None


def field(handle: Handle, number: int) -> int | None:
    """Return the unsigned integer in the field `number`, or None where it is not supported.

    Raises:
        NvmlFailure: see `ask`.
    """
    answer = ask("nvmlDeviceGetFieldValues", handle, [number])
    if answer is None:
        return None
    failure = from_code(int(answer[0].nvmlReturn))
    if failure is None:
        return int(answer[0].value.uiVal)
    if failure.is_not_supported:
        return None
    raise failure


def memory_limits(handle: Handle, cgroup: Path) -> tuple[int, int]:
    """Return the soft and the hard limit, in bytes, of a cgroup's memory on a GPU.

    `cgroup` is its directory.

    Raises:
        NvmlFailure: see `call`.
    """
    record = _record("c_nvmlGetMemoryLimits_v1_t", cgroup)
    call("nvmlDeviceGetMemoryLimits_v1", handle, record)
    return int(record.softLimit), int(record.hardLimit)


def set_memory_limits(handle: Handle, cgroup: Path, soft: int, hard: int) -> None:
    """Set both limits, in bytes; the driver may round either.

    Raises:
        NvmlFailure: see `call`.
    """
    record = _record("c_nvmlSetMemoryLimits_v1_t", cgroup)
    record.softLimit, record.hardLimit = soft, hard
    call("nvmlDeviceSetMemoryLimits_v1", handle, record)


def _record(kind: str, cgroup: Path) -> Any:
    """Return a struct of type `kind` for the cgroup with this directory."""
    made = getattr(pynvml, kind, None)
    if made is None:
        raise OldBinding(kind)
    record = made()
    record.nameSpace = os.fsencode(cgroup)
    return record


def has(name: str) -> bool:
    """Tell whether this release of the binding has the function `name`."""
    return hasattr(pynvml, name)


def start() -> None:
    """Initialise NVML, after a replacement of the driver with the new driver's library.

    Raises:
        NvmlFailure: see `call`.
    """
    try:
        call("nvmlInit")
    except DriverReplaced:
        if not _load_new_library():
            raise
        call("nvmlInit")


def stop() -> None:
    """End NVML's session, however often it was started; failures are ignored."""
    for _ in range(_MOST_SESSIONS):
        try:
            call("nvmlShutdown")
        except NvmlFailure:
            return


def _load_new_library() -> bool:
    """Load the library that replaced the one in use on disk; False if it is the same file.

    An upgrade of the driver leaves the old library mapped in this process, and the new kernel
    module refuses it. The new library is loaded by its resolved path: for the old name, the loader
    would return the old library.
    """
    mapped = _mapped_library()
    if mapped is None:
        return False
    installed = (mapped.parent / f"{_LIBRARY}.1").resolve()
    if installed == mapped or not installed.exists():
        return False
    try:
        pynvml.nvmlLib = ctypes.CDLL(str(installed))
    except OSError:
        return False
    pynvml._nvmlGetFunctionPointer_cache.clear()
    return True


def _mapped_library() -> Path | None:
    """Return the path of the library in use; the file may have been deleted."""
    name = Path(str(getattr(pynvml.nvmlLib, "_name", "")))
    if name.is_absolute():
        return name
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if f"/{_LIBRARY}" in line:
            return Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)"))
    return None
