"""NVML's errors: the classes, the translation of return codes, and the sentences for people.

Return codes are those of nvmlReturn_t in NVIDIA's nvml.h.
"""

from datetime import timedelta
from types import MappingProxyType
from typing import ClassVar

import pynvml

from gpulease.errors import NoGpus
from gpulease.units import format_span

INVALID_ARGUMENT = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
NO_PERMISSION = int(pynvml.NVML_ERROR_NO_PERMISSION)
NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
_LIBRARY_NOT_FOUND = int(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
_DRIVER_NOT_LOADED = int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_VERSION_MISMATCH = int(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
_NOT_SUPPORTED = frozenset(
    {
        int(pynvml.NVML_ERROR_NOT_SUPPORTED),
        int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        # The driver does not know this version of a struct or function.
        int(getattr(pynvml, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH", 25)),
        int(getattr(pynvml, "NVML_ERROR_DEPRECATED", 26)),
    }
)

# Old releases of the binding have one exception class. New ones also raise this one, which is not
# a subclass of NVMLError.
_LIBRARY_MISMATCH: type[Exception] = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
BINDING_ERRORS = (pynvml.NVMLError, _LIBRARY_MISMATCH, UnicodeDecodeError)
"""What a call of the binding raises."""


class NvmlFailure(Exception):
    """A call of NVML failed; calls for other values or other GPUs may still succeed."""

    codes: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_not_supported(self) -> bool:
        """Whether this GPU, driver or binding never has this value.

        After any other failure the value is unknown for now.
        """
        return self.code in _NOT_SUPPORTED


class OldBinding(NvmlFailure):
    """This release of nvidia-ml-py does not have the function; the driver may have it."""

    def __init__(self, name: str) -> None:
        code = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        super().__init__(code, f"this release of nvidia-ml-py has no {name}")


class GpuLost(NvmlFailure):
    """This GPU has fallen off the bus or needs a reset."""

    codes = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST})


class DriverGone(NvmlFailure):
    """No GPU can be read until NVML is initialised again."""

    codes = frozenset(
        {
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
    )


class DriverReplaced(DriverGone):
    """The kernel module and the library in this process are of different driver versions."""

    codes = frozenset({pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})


class NoAnswer(Exception):
    """The driver did not answer within the deadline, or does not list the GPU now."""


def from_binding(error: Exception) -> NvmlFailure:
    """Return the failure for one of `BINDING_ERRORS`."""
    if isinstance(error, UnicodeDecodeError):
        return NvmlFailure(pynvml.NVML_ERROR_UNKNOWN, "the driver returned text that is not UTF-8")
    code = int(getattr(error, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    for kind in (GpuLost, DriverReplaced, DriverGone):
        if code in kind.codes:
            return kind(code, str(error))
    return NvmlFailure(code, str(error))


def from_code(code: int) -> NvmlFailure | None:
    """Return the failure for a return code that came inside an answer; None for success."""
    return None if code == pynvml.NVML_SUCCESS else from_binding(pynvml.NVMLError(code))


_TRY_SIMULATED = (
    "to try gpulease without a GPU, set GPULEASE_SIMULATE=2x24G, "
    "or start gpuleased with --simulate 2x24G"
)
_REFUSALS = MappingProxyType(
    {
        _LIBRARY_NOT_FOUND: (
            "NVML (libnvidia-ml.so.1), a part of the NVIDIA driver, is not installed",
            f"install the NVIDIA driver; {_TRY_SIMULATED}",
        ),
        _DRIVER_NOT_LOADED: (
            "the NVIDIA driver is installed but not loaded",
            "load it with modprobe nvidia; if that fails, the kernel log (dmesg) shows why",
        ),
        NO_PERMISSION: (
            "the NVIDIA driver denies access to this user",
            "check the permissions of /dev/nvidiactl and /dev/nvidia*, or run gpuleased as root",
        ),
        _VERSION_MISMATCH: (
            "the loaded NVIDIA driver and its installed library are of different versions",
            "the driver was upgraded while in use: reboot, or unload and load its kernel modules",
        ),
    }
)


def no_gpus(failure: NvmlFailure) -> NoGpus:
    """Return the error for a driver that cannot be initialised."""
    why, hint = _REFUSALS.get(
        failure.code,
        (f"the NVIDIA driver reports: {failure}", "compare with the output of nvidia-smi"),
    )
    return NoGpus(f"cannot read the GPUs: {why}", hint)


def no_devices() -> NoGpus:
    """Return the error for a driver that works but lists no GPU."""
    return NoGpus(
        "cannot read the GPUs: the NVIDIA driver is loaded but finds no GPU",
        f"check whether lspci lists one, and what dmesg reports; {_TRY_SIMULATED}",
    )


def no_answer(waited_for: timedelta) -> NoGpus:
    """Return the error for a driver that hangs."""
    return NoGpus(
        f"cannot read the GPUs: the NVIDIA driver has not answered for {format_span(waited_for)}",
        "check whether nvidia-smi hangs too; if so, dmesg may show why, and a reboot may be needed",
    )


_LIMITS_SINCE_BINDING = "13.615"


def refuses_all_limits(failure: NvmlFailure) -> bool:
    """Tell whether a failed call of the memory limits would fail for every cgroup."""
    return failure.is_not_supported or failure.code == NO_PERMISSION


def why_no_limit(failure: NvmlFailure) -> str:
    """Return why the driver did not set or read a memory limit, as a clause for people."""
    if isinstance(failure, OldBinding):
        return f"{failure}; memory limits need {_LIMITS_SINCE_BINDING} or later"
    if failure.is_not_supported:
        return "this driver has no memory limits; they come with r615"
    if failure.code == NO_PERMISSION:
        return "the driver does not let this user set memory limits"
    return f"the driver reports: {failure}"
