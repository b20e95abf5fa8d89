"""Verbs that change jobs: edit, move, cancel, again, requeue, extend, keep.

What they do is in modules that the quick parser imports without typer.
"""

from typing import Annotated, Any

import typer

from gpulease.cli import change_jobs
from gpulease.cli.again import run_again
from gpulease.cli.cancel_jobs import cancel_jobs
from gpulease.cli.options import JobsArgument, SocketOption, named_socket, takes_its_options
from gpulease.cli.typer_extensions import CommandWithSpan

COMMANDS = {"extend": CommandWithSpan}


@takes_its_options
def edit(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
) -> None:
    """Change what waiting jobs ask for. They keep their age, and so their place.

    What is not named stays as it is. The new values are checked as at submission; of
    several jobs, all change or none. Of an array, the elements that still wait
    change. For running jobs, see gpulease extend and gpulease requeue.

    \b
    Examples:
      gpulease edit 17 --mem 6G --time 2h
      gpulease edit 17 --gpu any --gpu-model A100
      gpulease edit 17 18 --after 12 --name evaluation
      gpulease edit last --no-held
      gpulease edit 17 --after none --begin now
    """
    change_jobs.edit_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def move(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
) -> None:
    """Let waiting jobs start before other waiting jobs of yours.

    The other jobs fall back behind the moved one; the jobs of other users start no
    later. A job that fits nowhere now holds nobody back. The latest move counts.
    Admins may move any job before any other; it then takes the place of that one.

    \b
    Examples:
      gpulease move 17 --before 12
      gpulease move last --first
    """
    change_jobs.move_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def cancel(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
) -> int:
    """End jobs, and release the leases of holds.

    A waiting job leaves the queue. A running job gets SIGTERM and, if it is still
    there after its grace, SIGKILL, with all its processes. The number of an array
    means all its elements, 17_3 one of them. --name, --all and --user
    cancel any number of jobs in one step, so none of them starts meanwhile.

    \b
    Examples:
      gpulease cancel 17 18
      gpulease cancel 3-7 9
      gpulease cancel 17_3
      gpulease cancel last
      gpulease cancel --name 'sweep*'
      gpulease cancel --all --grace 5s
      gpulease cancel --user bob --name 'sweep*'
    """
    return cancel_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def again(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
) -> int:
    """Submit an ended job once more, and stay with it as run does.

    It gets a new number. Its command, directory and options are those of the old job,
    except for options that are given; its environment is that of this shell. A job of
    -d runs in the background again. For running jobs, see gpulease requeue.

    \b
    Examples:
      gpulease again 17
      gpulease again last --mem 8G
      gpulease again 17_3 -d --time 8h
    """
    return run_again(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def requeue(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
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
    return change_jobs.requeue_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def extend(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB... +SPAN", help="Numbers or names of jobs, then the time to add."
        ),
    ],
    *,
    socket: SocketOption = None,
    **typed: Any,
) -> int:
    """Add time to the limit of jobs, or remove some with a minus.

    \b
    Examples:
      gpulease extend 17 +2h
      gpulease extend last -30m
      gpulease extend --name 'sweep*' +1d12h
    """
    return change_jobs.extend_jobs(words=words, socket=named_socket(ctx, socket), **typed)


@takes_its_options
def keep(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
) -> int:
    """Protect idle leases from being released, for an hour or for --for.

    Where the admin has set it up, a lease that is not used is released if other jobs
    wait. The job's output and gpulease show say so beforehand. Repeat keep as often as
    needed.

    \b
    Examples:
      gpulease keep 17
      gpulease keep last --for 4h
    """
    return change_jobs.keep_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)
