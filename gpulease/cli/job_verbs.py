"""Verbs that change jobs: edit, move, cancel, requeue, extend, keep."""

import re
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from gpulease.cli.cancel_jobs import cancel_jobs
from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.extend_jobs import extend_jobs
from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.options import (
    AllOption,
    JobsArgument,
    NamePatternOption,
    takes_its_options,
    takes_options_of_edit,
)
from gpulease.cli.render import local_time, print_stdout
from gpulease.cli.resolved_options import begin_instant, dependencies
from gpulease.cli.typer_extensions import CommandWithSpan
from gpulease.client import Client
from gpulease.drawing.words import clean, clock, id_of, until
from gpulease.errors import BadUsage
from gpulease.options import OPTIONS, read_fields
from gpulease.units import format_span, parse_span
from gpulease.wire.jobs import EditedJobView, EditedView, JobView
from gpulease.wire.requests import EditRequest

COMMANDS = {"extend": CommandWithSpan}

_INSTANT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
"""As the daemon writes begin times."""


@takes_options_of_edit
def edit(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    *,
    socket: SocketOption = None,
    **typed: Any,
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
    wanted = selection("edit", jobs)
    given = {name: value for name, value in typed.items() if value is not None}
    if not given:
        raise BadUsage("cannot edit: nothing is to change", "gpulease edit 17 --mem 6G --time 2h")
    fields = _cleared(given)
    for part in read_fields(given).values():
        fields |= part
    if "begin" in given:
        fields["begin_at"] = begin_instant(given["begin"], local_time())
    client = connect(ctx, socket)
    if "after" in given:
        fields["after"] = dependencies(client, given["after"])
    request = EditRequest([], **fields)
    request.jobs = select_jobs(client, wanted)
    request.only_waiting = len(request.jobs) > len(wanted.words)
    for text in results(client.edit(request), local_time()):
        print_stdout(text)


def _cleared(given: dict[str, Any]) -> dict[str, Any]:
    """Take out the values such as any and none, and return the fields without a value."""
    fields = {}
    for name, value in list(given.items()):
        word, without = OPTIONS[name].clears or (None, None)
        if value in (word, [word]):
            del given[name]
            fields[OPTIONS[name].fields[0].rpartition(".")[2]] = without
    return fields


def results(view: EditedView, now: datetime) -> list[str]:
    """Describe jobs that were edited or moved: each of a few, or only their number."""
    if view.count > len(view.jobs):
        return [f"{view.count} jobs: {_changes(view.jobs[0], now)}, and so on"]
    return [f"job {clean(job.label)}: {_changes(job, now)}" for job in view.jobs]


def _changes(job: EditedJobView, now: datetime) -> str:
    changes = (
        _INSTANT.sub(lambda found: clock(found[0], now), each)
        if each.startswith("begin ")
        else each
        for each in job.changes
    )
    return clean("; ".join(changes)) or "nothing changes"


def move(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="JOB", help="Start before this job.")
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="Start before your other jobs.")] = False,
    socket: SocketOption = None,
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
    if (before is None) is not first:
        raise BadUsage(
            "cannot move: give either --before JOB or --first", "gpulease move 17 --before 12"
        )
    wanted = selection("move", jobs)
    client = connect(ctx, socket)
    target = None if before is None else _one(client, before)
    moved = client.move(select_jobs(client, wanted), target)
    for text in results(moved, local_time()):
        print_stdout(text)


def _one(client: Client, word: str) -> int:
    numbers = select_jobs(client, selection("move before", [word]))
    if len(numbers) > 1:
        raise BadUsage(
            f"cannot move before array {word}: name one of its elements",
            f"gpulease show {word} lists them",
        )
    return numbers[0]


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
    return for_each(numbers, lambda number: _requeued(client.requeue(number)))


def _requeued(job: JobView) -> str:
    """Describe a job that is queued again."""
    if job.retried_as is not None:
        return f"job {id_of(job)} is queued again as job {job.retried_as}"
    return f"job {id_of(job)} is ending, and is queued again when its processes have ended"


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
    return extend_jobs(words=words, socket=named_socket(ctx, socket), **typed)


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
    now = local_time()
    return for_each(
        numbers,
        lambda number: result_of_keep(client.keep(number, asked.total_seconds()), asked, now),
    )


def result_of_keep(job: JobView, span: timedelta, now: datetime) -> str:
    """Describe until when a job is kept, and from what it is not."""
    end = clock(job.kept_until_at, now)
    kept = (
        f"the lease of job {id_of(job)} is kept until {end}, for {format_span(span)}, even if idle"
    )
    stops_at = min((lease.stops_at for lease in job.leases if lease.stops_at), default=None)
    if stops_at is None:
        return kept
    left = until(stops_at, now)
    return f"{kept}; the job holds too much memory, and is stopped in {left} unless that ends"
