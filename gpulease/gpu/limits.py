"""Sets, reads and removes the driver's own memory limits on the cgroup of a job.

With driver r615 and later (NVIDIA, "MPS: memory partitioning"), all memory that the processes of a
cgroup hold on a GPU counts, contexts included. An allocation over the hard limit fails with
CUDA_ERROR_OUT_OF_MEMORY. A limit counts as set only after it was read back. MIG devices have no
such limits.
"""

from contextlib import suppress
from functools import partial
from pathlib import Path

from gpulease.domain.gpu import GpuUuid
from gpulease.gpu import nvml_binding, nvml_errors
from gpulease.gpu.nvml import NvmlProbe
from gpulease.gpu.nvml_binding import Handle
from gpulease.gpu.nvml_errors import NoAnswer, NvmlFailure, refuses_all_limits, why_no_limit
from gpulease.service.ports import NotLimited
from gpulease.units import MIB, format_size

_STEP = 256 * MIB
"""The step to which NVIDIA's guide shows limits rounded: 3000 MiB became 2560."""
_ABOUT_THIS_CGROUP = frozenset({nvml_errors.INVALID_ARGUMENT, nvml_errors.NOT_FOUND})
"""Codes that a driver with memory limits may return for a particular cgroup."""
_NOT_ON_MIG = "drivers have no memory limits for MIG devices: the size of the device is the limit"
"""NVIDIA, "MPS: memory partitioning": the functions do not accept MIG handles."""


class DriverLimits:
    """Memory limits by GPU and cgroup directory (cgroup v2). Each call blocks up to the deadline.

    May be used from several threads. Sets hard limits only: a soft limit reserves memory, which
    the lease already does.
    """

    def __init__(self, probe: NvmlProbe) -> None:
        self._probe = probe

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        """Return why this GPU cannot limit any cgroup, asking about `cgroup`; None: it can.

        Raises:
            NotLimited: that is not known now.
        """
        if _is_mig(gpu):
            return _NOT_ON_MIG
        try:
            self._on_gpu(gpu, partial(_read, cgroup=cgroup))
        except NvmlFailure as failure:
            if refuses_all_limits(failure):
                return why_no_limit(failure)
            if failure.code not in _ABOUT_THIS_CGROUP:
                raise NotLimited(why_no_limit(failure)) from failure
        return None

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        """Limit the processes of a cgroup to `memory` bytes; return the limit as read back.

        The driver may round it down. It is never larger than `memory`.

        Raises:
            NotLimited: the limit is not in force, or that is not known.
        """
        if _is_mig(gpu):
            raise NotLimited(_NOT_ON_MIG)
        try:
            return self._on_gpu(gpu, partial(_set, cgroup=cgroup, memory=memory))
        except NvmlFailure as failure:
            raise NotLimited(why_no_limit(failure)) from failure

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        """Return the limit of a cgroup now, in bytes; None for no limit.

        Raises:
            NotLimited: it cannot be read.
        """
        if _is_mig(gpu):
            return None
        try:
            limit = self._on_gpu(gpu, partial(_read, cgroup=cgroup))
        except NvmlFailure as failure:
            raise NotLimited(why_no_limit(failure)) from failure
        return None if limit == nvml_binding.NO_LIMIT else limit

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        """Remove the limits of a cgroup, which has to be done before the cgroup is removed.

        Does nothing where the driver has no limits at all.

        Raises:
            NotLimited: the driver refuses, or does not answer.
        """
        if _is_mig(gpu):
            return
        try:
            self._on_gpu(gpu, partial(_remove, cgroup=cgroup))
        except NvmlFailure as failure:
            if not refuses_all_limits(failure):
                raise NotLimited(why_no_limit(failure)) from failure

    def _on_gpu(self, gpu: GpuUuid, work: "partial[int]") -> int:
        try:
            return self._probe.on_gpu(gpu, work)
        except NoAnswer as failure:
            raise NotLimited(str(failure)) from failure


def _is_mig(gpu: GpuUuid) -> bool:
    return gpu.startswith("MIG-")


def _read(handle: Handle, cgroup: Path) -> int:
    return nvml_binding.memory_limits(handle, cgroup)[1]


def _set(handle: Handle, cgroup: Path, memory: int) -> int:
    try:
        # A driver that rounds up gets a second request, for a whole number of steps.
        for wanted in (memory, memory // _STEP * _STEP):
            nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=wanted)
            _, limit = nvml_binding.memory_limits(handle, cgroup)
            if 0 < limit <= memory:
                return limit
    except NvmlFailure:
        # The limit may be set and only unreadable. One that cannot be confirmed is removed.
        with suppress(NvmlFailure):
            nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=nvml_binding.NO_LIMIT)
        raise
    _remove(handle, cgroup)
    if limit == nvml_binding.NO_LIMIT:
        raise NotLimited("the driver accepted the limit but did not set it")
    raise NotLimited(f"asked for {format_size(memory)}, the driver set {format_size(limit)}")


def _remove(handle: Handle, cgroup: Path) -> int:
    soft, hard = nvml_binding.memory_limits(handle, cgroup)
    if soft:
        nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=hard)
    if hard != nvml_binding.NO_LIMIT:
        nvml_binding.set_memory_limits(handle, cgroup, soft=0, hard=nvml_binding.NO_LIMIT)
    return nvml_binding.NO_LIMIT
