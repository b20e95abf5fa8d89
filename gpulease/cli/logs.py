"""`gpulease logs`: what a job has written, each stream to its own."""

from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.render import pass_on


def logs(
    ctx: typer.Context,
    job: Annotated[int, typer.Argument(metavar="JOB", help="The id of a job.")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last N lines.")
    ] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Only its standard output.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only its standard error.")] = False,
    socket: SocketOption = None,
) -> None:
    """Print the output of a job: its stdout on stdout, its stderr on stderr, byte for byte.

    \b
    Examples:
      gpulease logs 17
      gpulease logs -f --tail 20 17
      gpulease logs --stdout 17 > result.csv
    """
    both = stdout == stderr
    pieces = connect(ctx, socket).logs(
        job, stdout=stdout or both, stderr=stderr or both, tail=tail, follow=follow
    )
    for kind, piece in pieces:
        pass_on(kind, piece)
