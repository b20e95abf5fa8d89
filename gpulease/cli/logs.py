"""`gpulease logs`: the kept output of jobs, each stream on its own."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.job_selection import names_array, one_element, select_jobs, selection
from gpulease.cli.job_watch import RECONNECT_EVERY
from gpulease.cli.options import AllOption, JobsArgument
from gpulease.cli.render import print_stderr, write_output
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import clean, id_of, sentence
from gpulease.errors import NoDaemon
from gpulease.wire.frames import FrameKind
from gpulease.wire.jobs import JobView
from gpulease.wire.text import ordinal


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
