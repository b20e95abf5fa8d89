"""`gpulease pause`: start no more jobs on this machine, for admins."""

from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.render import print_stdout
from gpulease.drawing.words import clean


def pause(
    ctx: typer.Context,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, shown to all users.")
    ] = None,
    socket: SocketOption = None,
) -> None:
    """Start no more jobs; running jobs continue. For admins and root.

    Users can still submit jobs, which wait. The queue stays paused across restarts,
    until gpulease unpause. To close single GPUs, use gpulease drain.

    \b
    Examples:
      gpulease pause --why "new driver at 18:00"
      gpulease unpause
    """
    view = connect(ctx, socket).pause(why=why)
    reason = f": {clean(view.paused.why)}" if view.paused and view.paused.why else ""
    state = "is" if view.changed else "was already"
    print_stdout(f"the queue {state} paused{reason}; running jobs continue")
