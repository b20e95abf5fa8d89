"""Print jobs in detail, for `gpulease show`."""

from __future__ import annotations

import sys

from gpulease.cli import job_page
from gpulease.cli.job_selection import names_array, range_of, select_jobs, selection
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import local_time, print_stdout, screen_of, show_page
from gpulease.cli.tables import Page, line
from gpulease.client.light_client import read
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import labels_of
from gpulease.errors import BadValue, GpuleaseError
from gpulease.light_json import indent
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gpulease.cli.job_selection import Selection
    from gpulease.client.light_client import LightClient
    from gpulease.wire.jobs import JobView


def print_jobs(
    *,
    jobs: Sequence[str] | None,
    name: str | None,
    every: bool,
    plot: bool,
    json: bool,
    socket: Path | str | None,
) -> None:
    """Print each of some jobs, with `plot` also charts of their memory."""
    wanted = selection("show", jobs, name, every)
    if plot and json:
        raise BadValue("cannot show jobs: --plot and --json exclude each other", "use one of them")
    if acts_on_slurm(socket):
        if plot:
            from gpulease.slurm.command.no_daemon import no_plot

            raise no_plot(", ".join(wanted.words))
        from gpulease.slurm.command import job_page as cluster_page

        cluster_page.print_jobs(wanted, json=json)
        return
    client = light_client(socket)
    numbers = select_jobs(client, wanted)
    replies = [client.job_json(number) for number in numbers]
    arrays = {
        job.id: client.jobs_json(everything=True, array=job.id)
        for job in map(read, replies)
        if names_array(wanted.words, job)
    }
    if json:
        print_stdout(indent(_as_json(wanted, numbers, replies, arrays)))
        return
    now = local_time()
    screen = screen_of(sys.stdout, environment())
    for place, (number, reply) in enumerate(zip(numbers, replies, strict=True)):
        above: Page = [line("")] if place else []
        if number in arrays:
            from gpulease.cli import array_page

            elements = read(arrays[number]).jobs
            show_page([*above, *array_page.page(elements, now)], screen)
        else:
            view = read(reply)
            show_page([*above, *job_page.page(view, now, _indexes(client, view))], screen)
            if plot:
                from gpulease.cli.plot_page import show_charts
                from gpulease.client import checked

                show_charts(checked(client.transport), number)


def _as_json(
    wanted: Selection,
    numbers: Sequence[int],
    replies: Sequence[bytes],
    arrays: Mapping[int, bytes],
) -> bytes:
    """Return a job, or the list of several; an array is the list of its elements."""
    if len(wanted.words) == 1 and range_of(wanted.words[0]) is None:
        return arrays.get(numbers[0], replies[0])
    return b'{"jobs":[' + b",".join(replies) + b"]}"


def _indexes(client: LightClient, job: JobView) -> Mapping[str, str]:
    """Return the index of each GPU by its UUID; nothing if the daemon does not answer."""
    if not job.leases:
        return {}
    try:
        return labels_of(client.status(queue=0).gpus)
    except GpuleaseError:
        return {}
