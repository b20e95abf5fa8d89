"""Verbs that follow jobs: attach, logs, wait."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import typer

from gpulease.cli import messages
from gpulease.cli.attachment import detach_sequence
from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.follow import FollowOptions, follow
from gpulease.cli.job_selection import names_array, one_element, select_jobs, selection
from gpulease.cli.job_watch import RECONNECT_EVERY, stderr_status
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption, takes_option
from gpulease.cli.render import print_stderr, write_output
from gpulease.cli.signals import Signals
from gpulease.client import Client
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import clean, id_of, sentence
from gpulease.errors import EXIT_GAVE_UP, NoDaemon, WrongState
from gpulease.locations import environment
from gpulease.units import parse_span
from gpulease.wire.frames import FrameKind
from gpulease.wire.jobs import JobView
from gpulease.wire.text import ordinal


@takes_option("detach_keys")
def attach(
    ctx: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The number or name of a job; 'last' is your newest job.",
            show_default=False,
        ),
    ] = None,
    name: NamePatternOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "--read-only", help="Only show output; send no input.")
    ] = False,
    detach_keys: str | None = None,
    socket: SocketOption = None,
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
    Exit code: that of the job, see gpulease run --help; 0 after detaching
    """
    keys = detach_sequence(detach_keys, environment())
    wanted = selection("attach", [job] if job else None, name)
    if acts_on_slurm(named_socket(ctx, socket)):
        from gpulease.slurm.command.job_control import attach_to

        return attach_to(wanted, watches=watch, has_keys=detach_keys is not None)
    client = connect(ctx, socket)
    (number,) = select_jobs(client, wanted)
    view = client.job(number)
    if names_array(wanted.words, view):
        raise one_element("attach", view)
    return attach_to_job(client, view, watches=watch, keys=keys)


def attach_to_job(
    client: Client, view: JobView, *, watches: bool = False, keys: bytes | None = None
) -> int:
    """Connect this terminal to a job, and return its exit code; 0 after detaching.

    Raises:
        WrongState: it has no output: it is a hold, or a job of Slurm.
        Others: as `follow`.
    """
    number = view.id
    if keys is None:
        keys = detach_sequence(None, environment())
    if view.kind == "hold":
        raise WrongState(
            f"cannot attach to job {number}: it is a hold, a lease without a command",
            f"gpulease show {number} describes it, gpulease cancel {number} releases it",
        )
    if view.kind == "slurm":
        raise WrongState(
            f"cannot attach to job {number}: Slurm runs it",
            f"sattach {view.slurm_job}.0 shows the output of its first step",
        )
    stderr = stderr_status()
    if view.state == "ended":
        stderr.print(messages.ended(view))
        return status_of_job(view)
    with Signals() as signals:
        options = FollowOptions(started=False, watches=watches, keys=keys)
        return follow(client, view, signals, stderr, options)


def logs(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="PATTERN", help="Your jobs with such names, as 'sweep*'."),
    ] = None,
    every: AllOption = False,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Continue until the job has ended.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            "-n", "--tail", metavar="N", min=0, help="Only the last N lines of each stream."
        ),
    ] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Only standard output.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only standard error.")] = False,
    socket: SocketOption = None,
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
    wanted = selection("logs", jobs, name, every)
    if acts_on_slurm(named_socket(ctx, socket)):
        from gpulease.slurm.command.logs import print_logs

        print_logs(wanted, follow=follow, tail=tail, stdout=stdout, stderr=stderr)
        return
    client = connect(ctx, socket)
    numbers = select_jobs(client, wanted)
    both = stdout == stderr
    for number in numbers:
        job = client.job(number)
        if names_array(wanted.words, job):
            raise one_element("logs", job)
        if len(numbers) > 1:
            print_stderr(f"gpulease: output of job {id_of(job)} ({clean(job.name)})")
        if why := why_no_output(job):
            print_stderr(f"gpulease: {why}")
        ask = partial(client.logs, number, stdout=stdout or both, stderr=stderr or both)
        if follow:
            _follow(partial(ask, follow=True), tail)
            continue
        for kind, piece in ask(tail=tail):
            write_output(kind, piece)


def _follow(ask: Callable[..., Iterator[tuple[FrameKind, bytes]]], tail: int | None) -> None:
    """Print the output of a job until it ends, also across a restart of the daemon."""
    at: dict[FrameKind, int] = {}
    is_away = False
    while True:
        try:
            for kind, piece in ask(tail=None if at else tail, begin=at, positions=at):
                write_output(kind, piece)
            return
        except NoDaemon:
            if not at:
                raise
            if not is_away:
                print_stderr("gpulease: lost connection to the daemon; waiting until it is back")
            is_away = True
            time.sleep(RECONNECT_EVERY)


def why_no_output(job: JobView) -> str | None:
    """Say why a job has no output, if it has not started."""
    why = f": {sentence(job.reason, job.hint)}" if job.reason else ""
    match job.state:
        case "queued":
            place = f", {ordinal(job.position)} in line" if job.position else ""
            return f"job {id_of(job)} has not started; it waits{place}{why}"
        case "granted":
            return f"job {id_of(job)} has not started yet, but its lease is granted"
        case "ended" if job.started_at is None and job.kind == "run":
            return f"job {id_of(job)} never started{why}"
        case _:
            return None


def wait(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    first: Annotated[
        bool, typer.Option("--any", help="Wait for one of them, and exit as it did.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="SPAN", help="Exit with 75 after this time."),
    ] = None,
    socket: SocketOption = None,
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
    limit = None if timeout is None else parse_span(timeout).total_seconds()
    wanted = selection("wait", jobs, name, every)
    deadline = None if limit is None else time.monotonic() + limit
    if acts_on_slurm(named_socket(ctx, socket)):
        from gpulease.slurm.command.job_control import worst_of

        return worst_of(wanted, deadline, first=first)
    client = connect(ctx, socket)
    return _worst(client, set(select_jobs(client, wanted)), deadline, first=first)


def _worst(client: Client, left: set[int], deadline: float | None, *, first: bool) -> int:
    """Return the highest exit code of the jobs `left`, across restarts of the daemon."""
    worst, is_away = 0, False
    while left:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            return EXIT_GAVE_UP
        try:
            for job in client.ends(sorted(left), remaining):
                left.discard(job.id)
                if job.retried_as is not None:
                    left.add(job.retried_as)
                    continue
                worst = max(worst, status_of_job(job))
                if first:
                    return worst
            is_away = False
        except NoDaemon:
            if not is_away:
                print_stderr("gpulease: lost connection to the daemon; waiting until it is back")
            is_away = True
            time.sleep(RECONNECT_EVERY)
    return worst
