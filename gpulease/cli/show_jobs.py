"""Print jobs in detail: `gpulease show`, and `gpulease run --dry-run`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli import job_page
from gpulease.cli.job_selection import names_array, range_of, select_jobs, selection
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import local_time, print_stdout, show_page, stdout_screen
from gpulease.cli.tables import Column, Page, Span, Table, line
from gpulease.client.light_client import read
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.arrays import array_of, indices_of
from gpulease.drawing.words import (
    behind_of,
    between,
    clean,
    clock,
    id_of,
    ids_of,
    in_the_way,
    label,
    labels_of,
    named,
    probable_start,
    reason_of,
    requested,
    sentence,
)
from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, BadValue, GpuleaseError
from gpulease.light_json import indent
from gpulease.units import format_span
from gpulease.wire.text import claimed, has_failed, ordinal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from gpulease.cli.job_selection import Selection
    from gpulease.cli.tables import Block, Line
    from gpulease.client.light_client import LightClient
    from gpulease.drawing.arrays import Array
    from gpulease.wire.jobs import ExplainView, JobView, NestedView
    from gpulease.wire.requests import SubmitRequest


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
    screen = stdout_screen()
    for place, (number, reply) in enumerate(zip(numbers, replies, strict=True)):
        above: Page = [line("")] if place else []
        if number in arrays:
            elements = read(arrays[number]).jobs
            show_page([*above, *array_page(elements, now)], screen)
        else:
            view = read(reply)
            show_page([*above, *job_page.page(view, now, _indexes(client, view))], screen)
            if plot:
                from gpulease.cli.plot import show_charts
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


# An array as a whole.

_MOST_ROWS = 30


def array_page(elements: Sequence[JobView], now: datetime) -> Page:
    """Lay out an array."""
    array = array_of(elements, now)
    return [
        (Span(f"array {array.first.id}", "title"), Span(f"  {named(array.first)}")),
        *job_page.labelled_lines(_fields_of_array(array, now)),
        *_groups_of(array, now),
    ]


def _fields_of_array(array: Array, now: datetime) -> Iterator[tuple[str, str]]:
    first = array.first
    most = None if first.queue is None else first.queue.array_most
    yield "elements", f"{len(array.elements)}: {indices_of(array.elements)}"
    yield "state", array.counts
    if most is not None:
        yield "at once", f"at most {most}"
    yield "user", clean(first.user)
    yield "command", clean(first.command)
    yield "asks", _range_of_requests(array.elements)
    yield "submitted", clock(first.submitted_at, now)


def _range_of_requests(elements: Sequence[JobView]) -> str:
    """Write what the elements ask for: 4G, or 4G to 6G after an edit of some."""
    sizes = {requested(job): job.claim for job in elements}

    def amount(text: str) -> tuple[int, float]:
        return sizes[text].gpus, sizes[text].memory or sizes[text].share or 0

    ordered = sorted(sizes, key=amount)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _groups_of(array: Array, now: datetime) -> Iterator[Block]:
    """Show a row for the elements that have one state and one reason, running ones first."""
    columns = (
        Column("JOB", right=True),
        Column("STATE"),
        Column("COUNT", right=True),
        Column("RAN", right=True),
        Column("EXIT", right=True),
        Column("REASON", wraps=True, least=20, below=""),
    )
    yield line("")
    yield Table(columns, tuple(_row(group, now) for group in array.groups[:_MOST_ROWS]))
    if (more := len(array.groups) - _MOST_ROWS) > 0:
        yield line(f"and {more} more rows; gpulease show --json has all", "dim")


def _row(group: Sequence[JobView], now: datetime) -> tuple[Line, ...]:
    job = group[0]
    failed = has_failed(job)
    alone = len(group) == 1
    return (
        line(ids_of(group)),
        line(label(job), "bad" if failed else ""),
        line(str(len(group))),
        line(between(job.started_at, job.ended_at, now) if alone else ""),
        line("" if job.exit_status is None else str(job.exit_status)),
        line(reason_of(job, now) or ""),
    )


# What would happen to a job.


def dry_run(
    client: LightClient, request: SubmitRequest, outer: NestedView | None, *, json: bool
) -> int:
    """Print what would happen to a job; return 0 if it would start now, 75 if it would wait, and
    125 if it would never start.

    `outer` is the lease that the command would run within.
    """
    if outer is not None and outer.job is not None:
        print_stdout(f"would run at once, within the lease of job {id_of(outer.job)}")
        return 0
    reply = client.explain_json(request)
    view: ExplainView = read(reply)
    if json:
        print_stdout(indent(reply))
    else:
        now = local_time()
        show_page(dry_run_page(view, now))
    if view.never_starts:
        return EXIT_OWN_FAILURE
    return 0 if view.starts_now else EXIT_GAVE_UP


def dry_run_page(view: ExplainView, now: datetime) -> Page:
    """Lay out what would happen to a job."""
    return [
        (Span(_summary(view), "title"),),
        *job_page.labelled_lines(_fields_of_dry_run(view, now)),
        *job_page.refusal_table(view.refusals),
    ]


def _summary(view: ExplainView) -> str:
    if view.starts_now:
        return f"would start now on {'GPU' if len(view.gpus) == 1 else 'GPUs'} " + ", ".join(
            clean(each) for each in view.gpus
        )
    if view.never_starts:
        return "would not start"
    if view.preempts:
        jobs = ", ".join(map(str, view.preempts))
        named, have = ("job", "has") if len(view.preempts) == 1 else ("jobs", "have")
        return f"would start when {named} {jobs} {have} made way"
    return f"would wait, {ordinal(view.position)} in line" if view.position else "would wait"


def _fields_of_dry_run(view: ExplainView, now: datetime) -> Iterator[tuple[str, str | None]]:
    yield "reason", sentence(view.reason) if view.reason else None
    yield "begin", f"not before {clock(view.begin_at, now)}" if view.begin_at else None
    yield "waits for", in_the_way(view)
    yield "behind", f"the reservation of job {behind_of(view)}" if view.behind else None
    yield "starts", probable_start(view, now)
    for each in view.suggestions:
        yield "starts now", job_page.suggestion_text(each)
    yield "asks", job_page.limited(claimed(view.claim), view.claim.time_limit)
    yield "size", clean(view.sized) if view.sized else None
    yield "runs for", f"{format_span(timedelta(seconds=view.runs_for))} (a prediction)"
