"""Verbs for admins: drain and resume GPUs, pause and unpause the queue, reserve GPUs for a time.

What they do is in a module that the quick parser imports without typer.
"""

from typing import Annotated, Any

import typer

from gpulease.cli import machine_control
from gpulease.cli.options import SocketOption, named_socket, takes_its_options

GpusArgument = Annotated[
    list[str],
    typer.Argument(metavar="GPU", help="Indexes, UUIDs, or the beginnings of UUIDs."),
]


@takes_its_options
def drain(
    ctx: typer.Context, gpus: GpusArgument, *, socket: SocketOption = None, **typed: Any
) -> int:
    """Stop granting leases on GPUs; running jobs continue. For admins and root.

    A drained GPU stays drained across restarts, until gpulease resume.

    \b
    Examples:
      gpulease drain 1 --why "new fan on Friday"
      gpulease drain 0 GPU-5f3a
    """
    return machine_control.drain_gpus(gpus=gpus, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def resume(
    ctx: typer.Context,
    gpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GPU", help="Drained GPUs, as for gpulease drain.", show_default=False
        ),
    ] = None,
    *,
    socket: SocketOption = None,
) -> int:
    """Start jobs again after gpulease pause; with GPUs, grant leases on them again.

    For admins and root. With GPUs it also ends a drain that gpulease made after a
    hardware fault. A new fault drains the GPU again; the same lasting one does not.

    \b
    Examples:
      gpulease resume
      gpulease resume 1
      gpulease resume 0 1
    """
    return machine_control.resume(gpus=gpus, socket=named_socket(ctx, socket))


@takes_its_options
def pause(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> None:
    """Start no more jobs; running jobs continue. For admins and root.

    Users can still submit jobs, which wait. The queue stays paused across restarts,
    until gpulease resume. To close single GPUs, use gpulease drain.

    \b
    Examples:
      gpulease pause --why "new driver at 18:00"
      gpulease resume
    """
    machine_control.pause_queue(socket=named_socket(ctx, socket), **typed)


@takes_its_options
def unpause(ctx: typer.Context, *, socket: SocketOption = None) -> None:
    """Start jobs again after gpulease pause, as gpulease resume does. For admins and root.

    Drained GPUs stay drained; gpulease resume GPU opens them.

    \b
    Examples:
      gpulease unpause
    """
    machine_control.unpause_queue(socket=named_socket(ctx, socket))


@takes_its_options
def reserve(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> None:
    """Set GPUs apart for a time, called a window. For admins and root; everyone may list.

    While a window is on, only jobs of its users start on its GPUs; without
    --user and --group, no job does. Other jobs start there before it only if
    they end in time: with a time limit (--time), before it begins; without
    one, if twice their predicted run time is over by then. Running jobs
    continue.

    --every takes five fields of crontab(5), in the time zone of the machine;
    the times of --from are in that of your shell.

    \b
    Examples:
      gpulease reserve --gpus 2 --from 'fri 18:00' --for 12h --user alice
      gpulease reserve --gpus all --every '0 22 * * *' --for 8h --group lab \\
        --lift-limits
      gpulease reserve --gpu 0 --gpu 1 --from +1h --for 2h --name fans
      gpulease reserve
      gpulease reserve --cancel fans
    """
    machine_control.reserve_gpus(socket=named_socket(ctx, socket), **typed)
