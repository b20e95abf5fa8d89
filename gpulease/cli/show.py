"""`gpulease show`: jobs in detail."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli import array_page
from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import index_of
from gpulease.cli.job_page import page
from gpulease.cli.job_selection import Selection, names_array, select_jobs, selection
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.cli.render import print_stdout, screen_of, show_page
from gpulease.cli.tables import Page, line
from gpulease.client import Client, decode
from gpulease.errors import GpuleaseError
from gpulease.light_json import indent
from gpulease.wire.jobs import JobList, JobView


def show(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    json: Annotated[
        bool, typer.Option("--json", help='Print JSON: the job, or {"jobs": [...]} for several.')
    ] = False,
    socket: SocketOption = None,
) -> None:
    """Show jobs in detail: state, place in the queue, leases, memory used, events.

    The number of an array sums up its elements; 17_3 is the element with index 3.

    \b
    Examples:
      gpulease show 17
      gpulease show 17_3
      gpulease show last
      gpulease show --json sweep-7 | jq .exit_status
    """
    wanted = selection("show", jobs, name, every)
    client = connect(ctx, socket)
    numbers = select_jobs(client, wanted)
    replies = [client.job_json(number) for number in numbers]
    arrays = {
        job.id: client.elements_json(job.id)
        for job in (decode(JobView, reply) for reply in replies)
        if names_array(wanted.words, job)
    }
    if json:
        print_stdout(indent(_as_json(wanted, numbers, replies, arrays)))
        return
    now = datetime.now(UTC).astimezone()
    screen = screen_of(sys.stdout, environment())
    for place, (number, reply) in enumerate(zip(numbers, replies, strict=True)):
        above: Page = [line("")] if place else []
        if number in arrays:
            elements = decode(JobList, arrays[number]).jobs
            show_page([*above, *array_page.page(elements, now)], screen)
        else:
            view = decode(JobView, reply)
            show_page([*above, *page(view, now, _indexes(client, view))], screen)


def _as_json(
    wanted: Selection,
    numbers: Sequence[int],
    replies: Sequence[bytes],
    arrays: Mapping[int, bytes],
) -> bytes:
    """Return a job, or the list of several; an array is the list of its elements."""
    if len(wanted.words) == 1:
        return arrays.get(numbers[0], replies[0])
    return b'{"jobs":[' + b",".join(replies) + b"]}"


def _indexes(client: Client, job: JobView) -> Mapping[str, str]:
    """Return the index of each GPU by its UUID; nothing if the daemon does not answer."""
    if not job.leases:
        return {}
    try:
        return {gpu.uuid: index_of(gpu) for gpu in client.status(queue=0).gpus}
    except GpuleaseError:
        return {}
