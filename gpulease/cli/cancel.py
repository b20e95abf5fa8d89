"""`gpulease cancel`: end jobs that wait or run, and release leases."""

from datetime import timedelta
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.units import format_span, parse_span
from gpulease.wire.views import JobView


def cancel(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
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
    there after its grace, SIGKILL, with all its processes.

    \b
    Examples:
      gpulease cancel 17 18
      gpulease cancel last
      gpulease cancel --name 'sweep*'
      gpulease cancel --all --grace 5s
    """
    seconds = None if grace is None else parse_span(grace).total_seconds()
    wanted = selection("cancel", jobs, name, every)
    client = connect(ctx, socket)
    numbers = select_jobs(client, wanted)
    return for_each(numbers, lambda number: result(client.cancel(number, grace=seconds), seconds))


def result(job: JobView, grace: float | None = None) -> str:
    """Describe a job that was cancelled with a grace of at most so many seconds."""
    released = f"the lease of job {job.id} is released"
    match job.state:
        case "releasing" if job.kind == "hold":
            return released
        case "ended" if job.outcome == "released":
            return released
        case "releasing":
            return f"job {job.id} is ending; {_afterwards(job, grace)}"
        case "ended" if job.outcome == "cancelled":
            return f"job {job.id} is cancelled"
        case "ended":
            return f"job {job.id} had already ended"
        case _:
            return f"job {job.id} will end"


def _afterwards(job: JobView, grace: float | None) -> str:
    if job.grace is None:  # a daemon of an earlier version
        return "processes that remain after its grace are killed"
    seconds = job.grace if grace is None else min(job.grace, grace)
    if seconds < 1:
        return "its processes are killed at once"
    return f"processes that remain after {format_span(timedelta(seconds=seconds))} are killed"
