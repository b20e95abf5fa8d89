"""`gpulease show`: its options and their help; `show_jobs` does the work."""

from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.cli.show_jobs import print_jobs


def show(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="With charts of its memory over time.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help='Print JSON: the job, or {"jobs": [...]} for several.')
    ] = False,
    socket: SocketOption = None,
) -> None:
    """Show jobs in detail: state, place in the queue, leases, memory used, events.

    Without JOB, it is the last one. The number of an array sums up its elements; 17_3
    is the element with index 3.

    \b
    Examples:
      gpulease show 17
      gpulease show 17_3
      gpulease show last
      gpulease show --plot last
      gpulease show --json sweep-7 | jq .exit_status
    """
    print_jobs(
        jobs=jobs,
        name=name,
        every=every,
        plot=plot,
        json=json,
        socket=named_socket(ctx, socket),
    )
