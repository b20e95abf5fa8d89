"""`gpulease status`: its options and their help; `status_page` does the work."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.status_page import print_status
from gpulease.cli.typer_extensions import Command as PlainCommand


class Command(PlainCommand):
    """The verb, whose option --watch needs no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; --watch before another option or at the end has an empty value."""
        return list(super().parse_args(ctx, [*_with_span(args)]))


def _with_span(args: Sequence[str]) -> Iterator[str]:
    for word, following in pairwise([*args, "-"]):
        yield word
        if word == "--watch" and following.startswith("-"):
            yield ""


def status(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            metavar="N",
            help="Show the first N waiting jobs, or all; default: 20, as far as they fit.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            "--watch",
            metavar="[SPAN]",
            help="Refresh in place every 2s (Slurm: 10s) or SPAN, until Ctrl-C or q.",
            show_default=False,
        ),
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Show GPUs, leases, the queue, and processes that use a GPU without a lease.

    On a cluster: the GPUs of all nodes, and the jobs of Slurm that use them.

    \b
    Examples:
      gpulease status
      gpulease status --watch
      gpulease status --queue all
      gpulease status --json | jq '.gpus[].memory.headroom'
    """
    return print_status(queue=queue, json=json, socket=named_socket(ctx, socket), watch=watch)
