"""`gpulease cancel`: its options and their help; `cancel_jobs` does the work."""

from typing import Annotated

import typer

from gpulease.cli.cancel_jobs import cancel_jobs
from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption


def cancel(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    user: Annotated[
        str | None,
        typer.Option(
            "-u",
            "--user",
            metavar="USER",
            help="Jobs of this user, all or with --name; for admins.",
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace",
            metavar="SPAN",
            help="Time between SIGTERM and SIGKILL, if that is shorter than the job's.",
        ),
    ] = None,
    socket: SocketOption = None,
) -> int:
    """End jobs, and release the leases of holds.

    A waiting job leaves the queue. A running job gets SIGTERM and, if it is still
    there after its grace, SIGKILL, with all its processes. The number of an array
    means all its elements, 17_3 one of them. --name, --all and --user
    cancel any number of jobs in one step, so none of them starts meanwhile.

    \b
    Examples:
      gpulease cancel 17 18
      gpulease cancel 3-7 9
      gpulease cancel 17_3
      gpulease cancel last
      gpulease cancel --name 'sweep*'
      gpulease cancel --all --grace 5s
      gpulease cancel --user bob --name 'sweep*'
    """
    return cancel_jobs(
        jobs=jobs,
        name=name,
        every=every,
        user=user,
        grace=grace,
        socket=named_socket(ctx, socket),
    )
