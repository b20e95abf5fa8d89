"""`gpulease requeue`: stop jobs, and queue them again."""

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.drawing.words import id_of
from gpulease.wire.jobs import JobView


def requeue(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    socket: SocketOption = None,
) -> int:
    """Stop running jobs, and queue them again.

    A job gets SIGTERM and, if it is still there after its grace, SIGKILL. Then a new
    job with the same command, options and age takes its place in the queue, and
    gpulease run follows that one. A program that saves its work at SIGTERM loses none.

    \b
    Examples:
      gpulease requeue 17
      gpulease requeue --name 'sweep*'
    """
    wanted = selection("requeue", jobs, name, every)
    client = connect(ctx, socket)
    numbers = select_jobs(client, wanted)
    return for_each(numbers, lambda number: result(client.requeue(number)))


def result(job: JobView) -> str:
    """Describe a job that is queued again."""
    if job.retried_as is not None:
        return f"job {id_of(job)} is queued again as job {job.retried_as}"
    return f"job {id_of(job)} is ending, and is queued again when its processes have ended"
