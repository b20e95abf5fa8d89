"""The one importer of pynvml: NVML's functions by name, and its failures sorted by what they mean.

Everything that differs between releases of the binding is settled here, and what a failure means
to callers. It knows nothing of deadlines or readings, and notes the end of each call for those who
have a deadline.
"""

import ctypes
import os
from pathlib import Path
from typing import Any, ClassVar, NewType

import pynvml

from gpulease.gpu.call_thread import note_progress

Handle = NewType("Handle", object)
"""A GPU as NVML hands it out; good until the session ends."""

NOT_AVAILABLE = 2**64 - 1
"""What NVML writes where a size cannot be told."""
MEMORY_V2: int | None = getattr(pynvml, "nvmlMemory_v2", None)
"""The version that asks for the memory reserved by the driver; None in old bindings."""

NO_LIMIT = 2**64 - 1
"""NVML_DEVICE_MEMORY_LIMIT_MAX: the hard limit of a cgroup that has none."""

TEMPERATURE_OF_GPU = int(pynvml.NVML_TEMPERATURE_GPU)

XID_EVENT = int(pynvml.nvmlEventTypeXidCriticalError)
RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older releases of the binding do not name."""
UNCORRECTED_SINCE_LOADED = (
    int(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    int(pynvml.NVML_VOLATILE_ECC),
)
"""Which errors nvmlDeviceGetTotalEccErrors is asked for."""
EVENT_WAIT = "nvmlEventSetWait_v2" if hasattr(pynvml, "nvmlEventSetWait_v2") else "nvmlEventSetWait"

LIBRARY_NOT_FOUND = int(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
DRIVER_NOT_LOADED = int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
INVALID_ARGUMENT = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
NO_PERMISSION = int(pynvml.NVML_ERROR_NO_PERMISSION)
LIB_RM_VERSION_MISMATCH = int(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
INVALID_ARGUMENT = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NO_SUCH_FIGURE = frozenset(
    {
        int(pynvml.NVML_ERROR_NOT_SUPPORTED),
        int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        # These two say that the driver does not know this version of a record or function.
        int(getattr(pynvml, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH", 25)),
        int(getattr(pynvml, "NVML_ERROR_DEPRECATED", 26)),
    }
)

_LIBRARY = "libnvidia-ml.so"
_MOST_SESSIONS = 64
# Older releases have one class for everything; newer ones raise this, which is no NVMLError.
_MISMATCH: type[Exception] = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)


class NvmlFailure(Exception):
    """A call to NVML failed; other calls, and other GPUs, may well succeed."""

    codes: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_no_such_figure(self) -> bool:
        """Say whether this GPU, driver or binding never has this figure.

        Every other failure means that the figure is unknown at this moment.
        """
        return self.code in _NO_SUCH_FIGURE


class OldBinding(NvmlFailure):
    """This release of nvidia-ml-py does not know the function, whatever the driver can do."""

    def __init__(self, name: str) -> None:
        code = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        super().__init__(code, f"this release of nvidia-ml-py has no {name}")


class GpuLost(NvmlFailure):
    """This GPU has fallen off the bus or waits for a reset."""

    codes = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST})


class DriverGone(NvmlFailure):
    """No GPU can be read until NVML has been initialised again."""

    codes = frozenset(
        {
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
    )


class DriverReplaced(DriverGone):
    """The driver in the kernel is another one than the library in this process."""

    codes = frozenset({pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})


def call(name: str, *arguments: object) -> Any:
    """Call the NVML function `name` and return what it answers.

    Raises:
        NvmlFailure: or one of its subclasses; a function that the binding or the library does not
            have counts as one of these.
    """
    function = getattr(pynvml, name, None)
    if function is None:
        raise OldBinding(name)
    try:
        answer = function(*arguments)
        # Old releases (11.450 for one) leave text as bytes.
        return answer.decode() if isinstance(answer, bytes) else answer
    except (pynvml.NVMLError, _MISMATCH, UnicodeDecodeError) as error:
        raise _failure(error) from error
    finally:
        note_progress()


def ask(name: str, *arguments: object) -> Any:
    """Call `name`, or return None where the GPU or the driver has no such figure.

    Raises:
        NvmlFailure: there is no answer at this moment. The caller has to treat the figure as
            unknown, never as zero or absent.
    """
    try:
        return call(name, *arguments)
    except NvmlFailure as failure:
        if failure.is_no_such_figure:
            return None
        raise


def ask_or_none(name: str, *arguments: object) -> Any:
    """Call `name`, or return None where there is no answer, whatever the reason.

    For figures that are only displayed: no decision may depend on the difference.

    Raises:
        GpuLost, DriverGone: the calls after this one would fail as well.
    """
    try:
        return call(name, *arguments)
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        return None


def field(handle: Handle, number: int) -> int | None:
    """Return a whole number by the number of its field, or None where there is no such field.

    Raises:
        NvmlFailure: see `ask`.
    """
    answer = ask("nvmlDeviceGetFieldValues", handle, [number])
    if answer is None:
        return None
    if answer[0].nvmlReturn != pynvml.NVML_SUCCESS:
        failure = _failure(pynvml.NVMLError(int(answer[0].nvmlReturn)))
        if failure.is_no_such_figure:
            return None
        raise failure
    return int(answer[0].value.uiVal)


def memory_limits(handle: Handle, cgroup: Path) -> tuple[int, int]:
    """Return the soft and the hard limit, in bytes, of what a cgroup may hold of a GPU.

    Raises:
        NvmlFailure: see `call`.
    """
    record = _record("c_nvmlGetMemoryLimits_v1_t", cgroup)
    call("nvmlDeviceGetMemoryLimits_v1", handle, record)
    return int(record.softLimit), int(record.hardLimit)


def set_memory_limits(handle: Handle, cgroup: Path, soft: int, hard: int) -> None:
    """Set both limits, in bytes; the driver may take another value for either.

    Raises:
        NvmlFailure: see `call`.
    """
    record = _record("c_nvmlSetMemoryLimits_v1_t", cgroup)
    record.softLimit, record.hardLimit = soft, hard
    call("nvmlDeviceSetMemoryLimits_v1", handle, record)


def _record(kind: str, cgroup: Path) -> Any:
    """Return a record about the cgroup whose directory this is."""
    made = getattr(pynvml, kind, None)
    if made is None:
        raise OldBinding(kind)
    record = made()
    record.nameSpace = os.fsencode(cgroup)
    return record


def has(name: str) -> bool:
    """Say whether this release of the binding has the function `name`."""
    return hasattr(pynvml, name)


def start() -> None:
    """Initialise NVML; if the driver was replaced, with the library that belongs to the new one.

    Raises:
        NvmlFailure: see `call`.
    """
    try:
        call("nvmlInit")
    except DriverReplaced:
        if not _load_again():
            raise
        call("nvmlInit")


def stop() -> None:
    """End NVML's session, however often it was started; what is wrong with it no longer matters."""
    for _ in range(_MOST_SESSIONS):
        try:
            call("nvmlShutdown")
        except NvmlFailure:
            return


def _failure(error: Exception) -> NvmlFailure:
    if isinstance(error, UnicodeDecodeError):
        return NvmlFailure(pynvml.NVML_ERROR_UNKNOWN, "the driver answered with broken text")
    code = int(getattr(error, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    for kind in (GpuLost, DriverReplaced, DriverGone):
        if code in kind.codes:
            return kind(code, str(error))
    return NvmlFailure(code, str(error))


def _load_again() -> bool:
    """Load the library that now lies where the one in use came from; False if it is the same.

    An upgrade of the driver leaves the old library mapped in this process, where it refuses to
    talk to the new kernel module for ever. The new one is asked for by its resolved path, since
    the loader would answer the old name with the old library.
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
    """Return the file of the library in use; it may since have been deleted."""
    name = Path(str(getattr(pynvml.nvmlLib, "_name", "")))
    if name.is_absolute():
        return name
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if f"/{_LIBRARY}" in line:
            return Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)"))
    return None
