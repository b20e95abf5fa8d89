"""What uses a GPU without a lease on it: the same in the command and on the web page."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulease.wire.machine import GpuView, ProcessView, StatusView

_MIB = 1 << 20
_OF_DRIVER = 256 * _MIB
"""Idle cards report 1 to 27 MiB, some about 100, with no process on them."""
_OF_DRIVER_SHARE = 100
"""Of a card above 25 GiB, a hundredth: the driver holds more on larger ones."""


def used_without_lease(gpu: GpuView, view: StatusView) -> int:
    """Return the bytes on a GPU without a lease that people should know of.

    Without a process in the list, a little memory is what the driver holds for itself.
    """
    unmanaged = gpu.memory.unmanaged or 0
    if any(unmanaged_processes(gpu, view, gone=True)):
        return unmanaged
    return beyond_driver(unmanaged, gpu.memory.total)


def most_of_driver(total: int | None) -> int:
    """Return the most bytes of a GPU that the driver alone holds: 256 MiB, or 1 % if more."""
    return max(_OF_DRIVER, (total or 0) // _OF_DRIVER_SHARE)


def beyond_driver(unmanaged: int | None, total: int | None) -> int:
    """Return memory that no process explains; 0 if it is the driver's."""
    return 0 if unmanaged is None or unmanaged <= most_of_driver(total) else unmanaged


def unmanaged_processes(
    gpu: GpuView, view: StatusView, *, gone: bool = False
) -> Iterator[ProcessView]:
    """Yield the processes on a GPU that have no lease on it.

    For a moment after the end of a job, the driver lists its processes, which are `gone`.
    """
    if not gpu.processes:
        return
    # A GPU that MIG divides lists the processes of its MIG devices.
    of_gpu = {gpu.uuid, *(each.uuid for each in view.gpus if each.parent == gpu.uuid)}
    leased = {job.id for job in view.jobs for lease in job.leases if lease.gpu in of_gpu}
    for process in gpu.processes:
        if process.job in leased or (process.serves and gpu.memory.leased):
            continue
        if gone or process.job is None or process.user is not None:
            yield process
