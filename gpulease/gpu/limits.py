"""The driver's own memory limits: set on the cgroup of a job, read back, and taken away again.

Driver r615 and later (NVIDIA, "MPS: memory partitioning"): all that the processes of a cgroup hold
of a GPU counts, contexts included, and an allocation over the hard limit fails with
CUDA_ERROR_OUT_OF_MEMORY. Nothing here is believed before it was read back. MIG devices have no such
limits, and the driver is not asked about them.
"""

from contextlib import suppress
from functools import partial
from pathlib import Path

from gpulease.domain.gpu import GpuUuid
from gpulease.gpu import nvml_binding
from gpulease.gpu.nvml import NoAnswer, NvmlProbe
from gpulease.gpu.nvml_binding import Handle, NvmlFailure, OldBinding
from gpulease.service.ports import NotLimited
from gpulease.units import MIB, format_size

_STEP = 256 * MIB
"""What NVIDIA's guide saw limits rounded to: 3000 MiB became 2560."""
_AGAINST_THIS_CGROUP = frozenset({nvml_binding.INVALID_ARGUMENT, nvml_binding.NOT_FOUND})
"""What the driver may answer about one cgroup although it has memory limits."""
_BINDING = "13.615"
_NOT_ON_MIG = "drivers have no memory limits for MIG devices: the size of the device is the limit"
"""NVIDIA, "MPS: memory partitioning": the calls take no MIG handles, so they are not made."""
_NONE_HERE = "this driver has no memory limits; they come with r615"


class DriverLimits:
    """Limits on GPUs, by the directory of a cgroup of version 2. Blocks, for the deadline at most.

    May be used from several threads. Only hard limits are set: a soft one is memory that others
    cannot have, which the lease is already.
    """

    def __init__(self, probe: NvmlProbe) -> None:
        self._probe = probe

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        """Return why no limit can be had on this GPU, asking about any cgroup; None: it can.

        Raises:
            NotLimited: there is no telling now.
        """
        if _is_mig(gpu):
            return _NOT_ON_MIG
        try:
            self._probe.on_gpu(gpu, partial(nvml_binding.memory_limits, cgroup=cgroup))
        except NoAnswer as failure:
            raise NotLimited(str(failure)) from failure
        except NvmlFailure as failure:
            if _is_final(failure):
                return _why(failure)
            if failure.code not in _AGAINST_THIS_CGROUP:
                raise NotLimited(_why(failure)) from failure
        return None

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        """Let the processes of a cgroup hold at most `memory` bytes; return what the driver keeps.

        That may be less, by its steps, and is never more.

        Raises:
            NotLimited: it is not in force, or cannot be known to be.
        """
        if _is_mig(gpu):
            raise NotLimited(_NOT_ON_MIG)
        return self._on(gpu, partial(_limit, cgroup=cgroup, memory=memory))

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        """Return the limit that the driver keeps a cgroup to now, in bytes; None: to none.

        Raises:
            NotLimited: there is no telling.
        """
        if _is_mig(gpu):
            return None
        held = self._on(gpu, partial(_kept, cgroup=cgroup))
        return None if held == nvml_binding.NO_LIMIT else held

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        """Take the limits of a cgroup away, as has to be before it is removed.

        Does nothing where the driver has no limits at all.

        Raises:
            NotLimited: the driver does not answer, or refuses.
        """
        if _is_mig(gpu):
            return
        try:
            self._probe.on_gpu(gpu, partial(_lift, cgroup=cgroup))
        except NoAnswer as failure:
            raise NotLimited(str(failure)) from failure
        except NvmlFailure as failure:
            if not _is_final(failure):
                raise NotLimited(_why(failure)) from failure

    def _on(self, gpu: GpuUuid, work: "partial[int]") -> int:
        try:
            return self._probe.on_gpu(gpu, work)
        except NoAnswer as failure:
            raise NotLimited(str(failure)) from failure
        except NvmlFailure as failure:
            raise NotLimited(_why(failure)) from failure


def _is_mig(gpu: GpuUuid) -> bool:
    return gpu.startswith("MIG-")


def _limit(handle: Handle, cgroup: Path, memory: int) -> int:
    try:
        # A driver that rounds up is asked again for a whole number of steps.
        for wanted in (memory, memory // _STEP * _STEP):
            nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=wanted)
            _, held = nvml_binding.memory_limits(handle, cgroup)
            if 0 < held <= memory:
                return held
    except NvmlFailure:
        # Perhaps it cannot be read. One that is not known to be there is not to be there.
        with suppress(NvmlFailure):
            nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=nvml_binding.NO_LIMIT)
        raise
    _lift(handle, cgroup)
    if held == nvml_binding.NO_LIMIT:
        raise NotLimited("the driver took the limit and does not keep it")
    raise NotLimited(f"asked for {format_size(memory)}, the driver keeps to {format_size(held)}")


def _kept(handle: Handle, cgroup: Path) -> int:
    return nvml_binding.memory_limits(handle, cgroup)[1]


def _lift(handle: Handle, cgroup: Path) -> int:
    soft, hard = nvml_binding.memory_limits(handle, cgroup)
    if soft:
        nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=hard)
    if hard != nvml_binding.NO_LIMIT:
        nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=nvml_binding.NO_LIMIT)
    return nvml_binding.NO_LIMIT


def _is_final(failure: NvmlFailure) -> bool:
    return failure.is_no_such_figure or failure.code == nvml_binding.NO_PERMISSION


def _why(failure: NvmlFailure) -> str:
    if isinstance(failure, OldBinding):
        return f"{failure}; memory limits need {_BINDING} or later"
    if failure.is_no_such_figure:
        return _NONE_HERE
    if failure.code == nvml_binding.NO_PERMISSION:
        return "the driver refuses to set memory limits for this user"
    return f"the driver answered: {failure}"
