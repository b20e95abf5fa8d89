"""Verbs for leases without a job: hold, adopt.

What they do is in a module that the quick parser imports without typer.
"""

from typing import Annotated, Any

import typer

from gpulease.cli.hold import adopt_process, hold_lease
from gpulease.cli.options import SocketOption, named_socket, takes_its_options


@takes_its_options
def hold(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> int:
    """Lease GPU memory for this shell, and print the variables that put it into effect.

    It waits in the queue as run does. The lease ends with the shell, with the
    process of --pid, or after --for. In a notebook, use gpulease.lease. If the
    process of --pid uses GPUs already, it gets a lease on these, at once or not at all.

    \b
    Examples:
      eval "$(gpulease hold --mem 4G)"
      eval "$(gpulease hold --mem 8G --gpus 2 --for 2h)"
      gpulease hold --mem 4G | source               (fish)
      gpulease cancel $GPULEASE_JOB                 (releases it)

    \b
    Exit code: 0, or
        2  an option or its value is wrong
       75  gave up waiting (--no-wait, --wait)
      125  gpulease failed, or the daemon refused the request
      130  Ctrl-C
    """
    return hold_lease(socket=named_socket(ctx, socket), **typed)


@takes_its_options
def adopt(
    ctx: typer.Context,
    pid: Annotated[
        int, typer.Argument(metavar="PID", help="The process; those below it count as well.")
    ],
    *,
    socket: SocketOption = None,
    **typed: Any,
) -> None:
    """Lease the memory that a process already uses. Admins may name any process.

    For a process that was started without gpulease. The lease is on the GPUs that the
    process uses, for what it holds there, and ends with the process. It belongs to
    the user of the process. It is granted at once, or refused.

    \b
    Examples:
      gpulease adopt 4711
      gpulease adopt 4711 --mem 40G --for 8h

    \b
    Exit code: 0, or
        2  an option or its value is wrong
       75  it does not fit beside other leases
      125  gpulease failed, or the daemon refused the request
    """
    adopt_process(pid=pid, socket=named_socket(ctx, socket), **typed)
