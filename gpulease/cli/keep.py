"""`gpulease keep`: a lease that is idle on purpose is not taken back."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.for_each import for_each
from gpulease.cli.format import clock, until
from gpulease.units import format_span, parse_span
from gpulease.wire.views import JobView


def keep(
    ctx: typer.Context,
    jobs: Annotated[list[int], typer.Argument(metavar="JOB", help="Ids of jobs or holds.")],
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
    asked = parse_span(span)
    client = connect(ctx, socket)
    now = datetime.now(UTC).astimezone()
    return for_each(
        jobs, lambda number: said(client.keep(number, asked.total_seconds()), asked, now)
    )


def said(job: JobView, span: timedelta, now: datetime) -> str:
    """Say until when a job is kept, and from what."""
    end = clock(job.kept_until_at, now)
    kept = f"job {job.id} may be idle until {end}, for {format_span(span)}"
    stops_at = min((each.stops_at for each in job.leases if each.stops_at), default=None)
    if stops_at is None:
        return f"{kept}; its lease is not taken back for that"
    left = until(stops_at, now)
    return f"{kept}; it is over its lease, and is stopped for that in {left} unless that ends"
