"""`gpulease status`: its options and their help; `status_page` does the work."""

from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.status_page import print_status
from gpulease.wire.machine import FIRST_IN_QUEUE


def status(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    queue: Annotated[
        str,
        typer.Option("--queue", metavar="N", help="Show the first N waiting jobs, or all."),
    ] = str(FIRST_IN_QUEUE),
    socket: SocketOption = None,
) -> None:
    """Show GPUs, leases, the queue, and processes that use a GPU without a lease.

    On a cluster: the GPUs of all nodes, and the jobs of Slurm that use them.

    \b
    Examples:
      gpulease status
      FORCE_COLOR=1 watch --color gpulease status
      gpulease status --queue all
      gpulease status --json | jq '.gpus[].memory.headroom'
    """
    print_status(queue=queue, json=json, socket=named_socket(ctx, socket))
