"""`gpulease resume`: grant leases again on drained GPUs, for admins."""

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.drain import GpusArgument, split_by_known
from gpulease.cli.job_selection import for_each
from gpulease.cli.render import print_stdout
from gpulease.wire.machine import GpuAvailabilityView


def resume(ctx: typer.Context, gpus: GpusArgument, socket: SocketOption = None) -> int:
    """Grant leases again on drained GPUs. For admins and root.

    Also ends a drain that gpulease made after a hardware fault. A new fault drains
    the GPU again; the same lasting one does not.

    \b
    Examples:
      gpulease resume 1
      gpulease resume 0 1
    """
    client = connect(ctx, socket)
    unknown, known = split_by_known(client, gpus)
    for name in unknown:
        print_stdout(_resumed(client.resume(name)))
    return for_each(known, lambda gpu: _resumed(client.resume(gpu)))


def _resumed(view: GpuAvailabilityView) -> str:
    if not view.changed:
        return f"GPU {view.label} was not drained"
    return f"GPU {view.label} takes leases again"
