"""`gpulease wait`: wait for the end of jobs, and exit as the worst of them did."""

import time
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.job_selection import select_jobs, selection
from gpulease.cli.job_watch import RECONNECT_EVERY
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.cli.render import print_stderr
from gpulease.client import Client
from gpulease.cluster_choice import acts_on_slurm
from gpulease.errors import EXIT_GAVE_UP, NoDaemon
from gpulease.units import parse_span


def wait(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    first: Annotated[
        bool, typer.Option("--any", help="Wait for one of them, and exit as it did.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="SPAN", help="Exit with 75 after this time."),
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Wait until jobs have ended, and exit with the highest of their exit codes.

    Jobs that are tried or queued again are followed to the end of the last attempt.
    The jobs do not notice: Ctrl-C ends only the wait.

    \b
    Examples:
      gpulease wait 17 18 && gpulease run evaluate.py
      gpulease wait --name 'sweep*'
      gpulease wait --any 17 18
      gpulease wait last --timeout 2h || echo "failed, or it still runs"
    """
    limit = None if timeout is None else parse_span(timeout).total_seconds()
    wanted = selection("wait", jobs, name, every)
    deadline = None if limit is None else time.monotonic() + limit
    if acts_on_slurm(named_socket(ctx, socket)):
        from gpulease.slurm.command.wait import worst_of

        return worst_of(wanted, deadline, first=first)
    client = connect(ctx, socket)
    return _worst(client, set(select_jobs(client, wanted)), deadline, first=first)


def _worst(client: Client, left: set[int], deadline: float | None, *, first: bool) -> int:
    """Return the highest exit code of the jobs `left`, across restarts of the daemon."""
    worst, is_away = 0, False
    while left:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            return EXIT_GAVE_UP
        try:
            for job in client.ends(sorted(left), remaining):
                left.discard(job.id)
                if job.retried_as is not None:
                    left.add(job.retried_as)
                    continue
                worst = max(worst, status_of_job(job))
                if first:
                    return worst
            is_away = False
        except NoDaemon:
            if not is_away:
                print_stderr("gpulease: lost connection to the daemon; waiting until it is back")
            is_away = True
            time.sleep(RECONNECT_EVERY)
    return worst
