"""`gpulease resume`: grant on GPUs again that were drained, for admins."""

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.drain import GpusArgument
from gpulease.cli.for_each import for_each, strange_first
from gpulease.cli.render import show
from gpulease.wire.views import GpuAvailabilityView


def resume(ctx: typer.Context, gpus: GpusArgument, socket: SocketOption = None) -> int:
    """Grant on GPUs again, whoever drained them. For admins and root.

    One that gpulease drained for a fault of its hardware is used again at once; a new fault drains
    it anew, the same lasting one does not.

    \b
    Examples:
      gpulease resume 1
      gpulease resume 0 1
    """
    client = connect(ctx, socket)
    strange, known = strange_first(client, gpus)
    for name in strange:
        show(resumed(client.resume(name)))
    return for_each(known, lambda gpu: resumed(client.resume(gpu)))


def resumed(view: GpuAvailabilityView) -> str:
    """Say how a GPU stands that somebody wanted resumed."""
    if not view.changed:
        return f"GPU {view.label} was not drained"
    return f"GPU {view.label} takes leases again"
