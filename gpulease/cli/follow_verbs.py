"""Verbs that follow jobs: attach, logs, wait.

What they do is in a module that the quick parser imports without typer.
"""

from typing import Annotated, Any

import typer

from gpulease.cli import follow_jobs
from gpulease.cli.options import JobsArgument, SocketOption, named_socket, takes_its_options


@takes_its_options
def attach(
    ctx: typer.Context,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB",
            help="The number or name of a job; 'last' is your newest job.",
            show_default=False,
        ),
    ] = None,
    *,
    socket: SocketOption = None,
    **typed: Any,
) -> int:
    """Connect this terminal to a job: show its last output, continue live, exit as it does.

    A job with a terminal takes over your keys and the size of your terminal. A job
    on pipes gets Ctrl-C only. Ctrl-\\ and then d detach; so does closing the terminal.
    Without JOB, it is the last one.

    \b
    Examples:
      gpulease attach
      gpulease attach --watch sweep-7

    \b
    Exit code: that of the job, see gpulease run --help-all; 0 after detaching
    """
    return follow_jobs.attach(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def logs(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
) -> None:
    """Print the output of jobs: their stdout on stdout, their stderr on stderr.

    A waiting job has no output yet; with -f it is printed once the job starts.
    Of several jobs, one is printed after the other. Without JOB, it is the last one.

    \b
    Examples:
      gpulease logs -f
      gpulease logs 17
      gpulease logs 17_3
      gpulease logs -f --tail 20 last
      gpulease logs --stdout sweep-7 > result.csv
    """
    follow_jobs.print_logs(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def wait(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
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
    return follow_jobs.wait_for_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)
