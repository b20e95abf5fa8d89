"""`gpulease keep`: protect idle leases from being released."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.drawing.words import clock, id_of, until
from gpulease.units import format_span, parse_span
from gpulease.wire.jobs import JobView


def keep(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    span: Annotated[
        str, typer.Option("--for", metavar="SPAN", help="For how long, at most a day.")
    ] = "1h",
    socket: SocketOption = None,
) -> int:
    """Protect idle leases from being released, for an hour or for --for.

    Some admins have leases released that nobody uses while other jobs wait. The
    output of the job and gpulease show announce it. Repeat keep as often as needed.

    \b
    Examples:
      gpulease keep 17
      gpulease keep last --for 4h
    """
    asked = parse_span(span)
    wanted = selection("keep", jobs, name, every)
    client = connect(ctx, socket)
    numbers = select_jobs(client, wanted)
    now = datetime.now(UTC).astimezone()
    return for_each(
        numbers, lambda number: result(client.keep(number, asked.total_seconds()), asked, now)
    )


def result(job: JobView, span: timedelta, now: datetime) -> str:
    """Describe until when a job is kept, and from what it is not."""
    end = clock(job.kept_until_at, now)
    kept = (
        f"the lease of job {id_of(job)} is kept until {end}, for {format_span(span)}, even if idle"
    )
    stops_at = min((lease.stops_at for lease in job.leases if lease.stops_at), default=None)
    if stops_at is None:
        return kept
    left = until(stops_at, now)
    return f"{kept}; the job is over its lease, and is stopped in {left} unless that ends"
