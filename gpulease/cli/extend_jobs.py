"""Change the time limits of jobs, for `gpulease extend`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import local_time
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import clock, id_of, until
from gpulease.errors import BadUsage
from gpulease.units import format_span, parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path

    from gpulease.wire.jobs import JobView


def extend_jobs(
    *, words: Sequence[str] | None, name: str | None, every: bool, socket: Path | str | None
) -> int:
    """Add time to the limits of jobs, and return the exit code."""
    jobs, seconds = read_extension(words or ())
    wanted = selection("extend", jobs, name, every)
    if acts_on_slurm(socket):
        from gpulease.slurm.command import job_control

        return job_control.extend_jobs(wanted, seconds)
    client = light_client(socket)
    numbers = select_jobs(client, wanted)
    now = local_time()
    return for_each(numbers, lambda number: result_of_extend(client.extend(number, seconds), now))


def read_extension(words: Sequence[str]) -> tuple[list[str], float]:
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


def result_of_extend(job: JobView, now: datetime) -> str:
    """Describe until when a job may run now."""
    if (end := job.expires_at) is not None:
        return f"job {id_of(job)} now ends at {clock(end, now)}, in {until(end, now)}"
    limit = timedelta(seconds=job.claim.time_limit or 0)
    return f"job {id_of(job)} may run for {format_span(limit)} once it starts"
