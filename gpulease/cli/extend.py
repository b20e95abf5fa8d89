"""`gpulease extend`: change the time limits of jobs."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.options import AllOption, NamePatternOption
from gpulease.cli.typer_extensions import CommandWithSpan as Command
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import clock, id_of, until
from gpulease.errors import BadUsage
from gpulease.units import format_span, parse_span
from gpulease.wire.jobs import JobView

__all__ = ["Command", "extend"]


def extend(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB... +SPAN", help="Numbers or names of jobs, then the time to add."
        ),
    ],
    name: NamePatternOption = None,
    every: AllOption = False,
    socket: SocketOption = None,
) -> int:
    """Add time to the limit of jobs, or remove some with a minus.

    \b
    Examples:
      gpulease extend 17 +2h
      gpulease extend last -30m
      gpulease extend --name 'sweep*' +1d12h
    """
    jobs, seconds = read(words)
    wanted = selection("extend", jobs, name, every)
    if acts_on_slurm(named_socket(ctx, socket)):
        from gpulease.slurm.command.changes import extend_jobs

        return extend_jobs(wanted, seconds)
    client = connect(ctx, socket)
    numbers = select_jobs(client, wanted)
    now = datetime.now(UTC).astimezone()
    return for_each(numbers, lambda number: result(client.extend(number, seconds), now))


def read(words: list[str]) -> tuple[list[str], float]:
    """Return the jobs, and the seconds to add (below zero: to remove), in `JOB... +SPAN`.

    Raises:
        BadUsage: the last word is the number or the name of a job, by its form.
        BadValue: the last word is no span of time.
    """
    *jobs, span = words
    if span.isdigit() or span.isalpha():
        raise BadUsage(
            f"cannot extend: {span!r} is no span of time to add",
            "the time comes last: gpulease extend 17 +2h",
        )
    sign = -1 if span.startswith("-") else 1
    amount = parse_span(span[1:] if span.startswith(("+", "-")) else span)
    return jobs, sign * amount.total_seconds()


def result(job: JobView, now: datetime) -> str:
    """Describe until when a job may run now."""
    if (end := job.expires_at) is not None:
        return f"job {id_of(job)} now ends at {clock(end, now)}, in {until(end, now)}"
    limit = timedelta(seconds=job.claim.time_limit or 0)
    return f"job {id_of(job)} may run for {format_span(limit)} once it starts"
