"""`gpulease cancel`: ask jobs to end, whether they wait or run, and give leases back."""

from datetime import timedelta
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.for_each import for_each
from gpulease.units import format_span, parse_span
from gpulease.wire.views import JobView


def cancel(
    ctx: typer.Context,
    jobs: Annotated[list[int], typer.Argument(metavar="JOB", help="Ids of jobs.")],
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="SPAN", help="Kill what is left after so long, if that is sooner."
        ),
    ] = None,
    socket: SocketOption = None,
) -> int:
    """End jobs: one that waits leaves the queue, one that runs is asked to go, then made to.

    The lease of a hold is given back.

    \b
    Examples:
      gpulease cancel 17
      gpulease cancel 17 18 19
      gpulease cancel --grace 5s 17
    """
    within_s = None if grace is None else parse_span(grace).total_seconds()
    client = connect(ctx, socket)
    return for_each(jobs, lambda number: said(client.cancel(number, grace=within_s), within_s))


def said(job: JobView, within_s: float | None = None) -> str:
    """Say what became of a job that was cancelled, with a grace of `within_s` at most."""
    given_back = f"the lease of job {job.id} is given back"
    match job.state:
        case "releasing" if job.kind == "hold":
            return given_back
        case "ended" if job.outcome == "released":
            return given_back
        case "releasing":
            then = _afterwards(job, within_s)
            return f"job {job.id} is asked to end; what is left of it {then} is killed"
        case "ended" if job.outcome == "cancelled":
            return f"job {job.id} is cancelled"
        case "ended":
            return f"job {job.id} had ended before"
        case _:
            return f"job {job.id} will end"


def _afterwards(job: JobView, within_s: float | None) -> str:
    if job.grace is None:
        return "after its grace"  # a daemon of before, which does not tell
    seconds = job.grace if within_s is None else min(job.grace, within_s)
    return f"after {format_span(timedelta(seconds=seconds))}" if seconds >= 1 else "at once"
