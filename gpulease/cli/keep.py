"""`gpulease keep`: a lease that is idle on purpose is not taken back."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.render import complain, show
from gpulease.cli.text import clock, until
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.units import parse_span
from gpulease.wire import JobView


def keep(
    ctx: typer.Context,
    jobs: Annotated[list[int], typer.Argument(metavar="JOB...", help="Ids of jobs or holds.")],
    span: Annotated[
        str, typer.Option("--for", metavar="SPAN", help="For how long; at most a day.")
    ] = "1h",
    socket: SocketOption = None,
) -> int:
    """Keep leases that are idle on purpose, for an hour or as long as --for says.

    On machines where a lease that nobody uses goes to those who wait, this one stays.

    \b
    Examples:
      gpulease keep 17
      gpulease keep 17 18 --for 4h
    """
    seconds = parse_span(span).total_seconds()
    client = connect(ctx, socket)
    status = 0
    for number in dict.fromkeys(jobs):
        try:
            show(said(client.keep(number, seconds), datetime.now(UTC).astimezone()))
        except NoDaemon:
            raise
        except GpuleaseError as error:
            complain(error)
            status = error.exit_code
    return status


def said(job: JobView, now: datetime) -> str:
    """Say until when a job is kept."""
    end = job.kept_until_at
    return f"job {job.id} is kept until {clock(end, now)}, for {until(end, now)}, used or not"
