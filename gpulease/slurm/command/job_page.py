"""`gpulease show` on a cluster: jobs of Slurm in detail."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from gpulease.cli.job_page import labelled_lines, limited, times
from gpulease.cli.job_selection import Selection
from gpulease.cli.render import local_time, print_stdout, show_page, stdout_screen
from gpulease.cli.tables import Page, Span, line
from gpulease.drawing.words import UNKNOWN, clean, size
from gpulease.light_json import encode, indent
from gpulease.slurm.command.jobs import order_of, with_gpus
from gpulease.slurm.command.list_page import table
from gpulease.slurm.command.logs import described
from gpulease.slurm.command.selection import is_array, select
from gpulease.slurm.command.views import (
    JobList,
    JobView,
    expected,
    gpus_of,
    nodes_of,
    outcome_of,
    place_of,
    reason_of,
    requested,
    shard_and_used,
)

_MOST_ROWS = 30
"""Elements of an array that a page shows."""


def print_jobs(wanted: Selection, *, json: bool) -> None:
    """Print each of some jobs; of an array, its elements."""
    found, (shard, used) = select(wanted), shard_and_used()
    jobs = {
        word: sorted(with_gpus(rows, shard, used), key=order_of) for word, rows in found.items()
    }
    if json:
        one = (
            len(found) == 1
            and len(wanted.words) == 1
            and not any(is_array(*each) for each in found.items())
        )
        views = [view for each in jobs.values() for view in each]
        print_stdout(indent(encode(views[0] if one else JobList(views, len(views)))))
        return
    now, screen = local_time(), stdout_screen()
    for place, (word, views) in enumerate(jobs.items()):
        if place:
            show_page([line("")], screen)
        if is_array(word, found[word]):
            show_page(array_page(word, views, now), screen)
        else:
            show_page(page(views[0], now, described(word, found[word][0])), screen)


def array_page(word: str, elements: Sequence[JobView], now: datetime) -> Page:
    """Lay out the elements of an array that Slurm still knows, those that have ended last."""
    counts = Counter[str]()
    for job in elements:
        counts[outcome_of(job)] += place_of(job)
    found = (
        ("elements", str(counts.total())),
        ("state", ", ".join(f"{count} {state}" for state, count in counts.most_common())),
        ("user", clean(elements[0].user)),
        ("asks", requested(elements[0])),
    )
    shown = sorted(elements, key=lambda job: job.state == "ended")[:_MOST_ROWS]
    more = len(elements) - len(shown)
    text = f"{more} more; gpulease show --json {word} shows them"
    head = (Span(f"array {word}", "title"), Span(f"  {clean(elements[0].name)}"))
    below = [line(text, "dim")] if more else []
    return [head, *labelled_lines(found), line(""), table(shown, now), *below]


def page(job: JobView, now: datetime, output: str | None = None) -> Page:
    """Lay out one job; `output` has the names of the files with its output."""
    number = f"  (Slurm's JobId {job.id})" if job.array is not None and job.array != job.id else ""
    head = (Span(f"job {job.label}", "title"), Span(f"  {clean(job.name)}{number}"))
    found = [*fields(job, now), ("output", output)]
    return [head, *labelled_lines((name, text) for name, text in found if text != UNKNOWN)]


def fields(job: JobView, now: datetime) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the text of each line."""
    state = outcome_of(job)
    yield "state", state
    yield "reason", reason_of(job, now)
    when = expected(job, now)
    yield "starts", None if when == UNKNOWN else f"{when} (a prediction of Slurm)"
    yield "user", clean(job.user)
    yield "asks", limited(requested(job), job.claim.time_limit)
    yield "used", None if job.used is None else f"{size(job.used)} at most"
    yield "node", nodes_of(job)
    yield "GPU", gpus_of(job)
    yield "partition", clean(job.partition)
    yield "requeued", f"{job.requeued}x" if job.requeued else None
    yield from times(job, now)
    yield "exit status", None if job.exit_status is None else str(job.exit_status)
    why = f", {clean(job.slurm_reason)}" if job.slurm_reason else ""
    yield "in Slurm", f"{clean(job.slurm_state)}{why}"
