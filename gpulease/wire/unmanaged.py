"""Which processes use a GPU without a lease on it: the same in the command and on the web page."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulease.wire.machine import GpuView, ProcessView, StatusView


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
