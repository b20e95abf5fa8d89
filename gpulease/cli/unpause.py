"""`gpulease unpause`: start jobs again on this machine, for admins."""

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.render import print_stdout


def unpause(ctx: typer.Context, socket: SocketOption = None) -> None:
    """Start jobs again after gpulease pause. For admins and root.

    Drained GPUs stay drained; gpulease resume opens them.

    \b
    Examples:
      gpulease unpause
    """
    view = connect(ctx, socket).unpause()
    print_stdout("jobs start again" if view.changed else "the queue was not paused")
