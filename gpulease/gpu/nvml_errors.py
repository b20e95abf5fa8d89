"""Why the GPUs of this machine cannot be used, in words, and what to do about it."""

from datetime import timedelta
from types import MappingProxyType

from gpulease.errors import NoGpus
from gpulease.gpu import nvml_binding
from gpulease.gpu.nvml_binding import NvmlFailure
from gpulease.units import format_span

_TRY_SIMULATED = (
    "to try gpulease without a GPU, set GPULEASE_SIMULATE=2x24G, "
    "or start gpuleased with --simulate 2x24G"
)

_WHY = MappingProxyType(
    {
        nvml_binding.LIBRARY_NOT_FOUND: (
            "NVML (libnvidia-ml.so.1), a part of the NVIDIA driver, is not on this machine",
            f"install the NVIDIA driver; {_TRY_SIMULATED}",
        ),
        nvml_binding.DRIVER_NOT_LOADED: (
            "the NVIDIA driver is installed but not loaded",
            "load it with modprobe nvidia; the kernel's log (dmesg) says why it would not load",
        ),
        nvml_binding.NO_PERMISSION: (
            "the NVIDIA driver refuses this user",
            "look at the permissions of /dev/nvidiactl and /dev/nvidia*, or run gpuleased as root",
        ),
        nvml_binding.LIB_RM_VERSION_MISMATCH: (
            "the loaded NVIDIA driver and its installed library are of different versions",
            "the driver was upgraded while in use: reboot, or unload and load its kernel modules",
        ),
    }
)


def refusal(failure: NvmlFailure) -> NoGpus:
    """Return the error for a driver that could not be talked to."""
    why, hint = _WHY.get(
        failure.code,
        (f"the NVIDIA driver answered: {failure}", "compare with what nvidia-smi says"),
    )
    return NoGpus(f"cannot read the GPUs: {why}", hint)


def no_devices() -> NoGpus:
    """Return the error for a driver that works and lists no GPU."""
    return NoGpus(
        "cannot read the GPUs: the NVIDIA driver is loaded and finds no GPU",
        f"see whether lspci lists one, and what dmesg says of it; {_TRY_SIMULATED}",
    )


def no_answer(waited_for: timedelta) -> NoGpus:
    """Return the error for a driver that hangs."""
    return NoGpus(
        f"cannot read the GPUs: the NVIDIA driver has not answered for {format_span(waited_for)}",
        "see whether nvidia-smi hangs too; if so, dmesg may say why, and a reboot may be needed",
    )
