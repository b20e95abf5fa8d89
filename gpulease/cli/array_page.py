"""The page of `gpulease show` about a whole array: how many elements are in which state."""

from __future__ import annotations

from gpulease.cli.tables import Block, Column, Hanging, Line, Page, Span, Table, line
from gpulease.drawing.arrays import Array, array_of, indices_of
from gpulease.drawing.words import (
    between,
    clean,
    clock,
    ids_of,
    label,
    named,
    reason_of,
    requested,
)
from gpulease.wire.text import has_failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from gpulease.wire.jobs import ClaimView, JobView

_LABELS = 12
_MOST_ROWS = 30


def page(elements: Sequence[JobView], now: datetime) -> Page:
    """Lay out an array."""
    array = array_of(elements, now)
    return [
        (Span(f"array {array.first.id}", "title"), Span(f"  {named(array.first)}")),
        *(_pair(name, text) for name, text in _fields(array, now)),
        *_groups(array, now),
    ]


def _pair(name: str, text: str) -> Block:
    return Hanging((Span(f"  {name:<{_LABELS}}", "dim"), Span(text)), _LABELS + 2)


def _fields(array: Array, now: datetime) -> Iterator[tuple[str, str]]:
    first = array.first
    most = None if first.queue is None else first.queue.array_most
    yield "elements", f"{len(array.elements)}: {indices_of(array.elements)}"
    yield "state", array.counts
    if most is not None:
        yield "at once", f"at most {most}"
    yield "user", clean(first.user)
    yield "command", clean(first.command)
    yield "asks", _requested(array.elements)
    yield "submitted", clock(first.submitted_at, now)


def _requested(elements: Sequence[JobView]) -> str:
    """Write what the elements ask for: 4G, or 4G to 6G after an edit of some."""
    sizes = {requested(job): job.claim for job in elements}
    ordered = sorted(sizes, key=lambda text: _amount(sizes[text]))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _amount(claim: ClaimView) -> tuple[int, float]:
    return claim.gpus, claim.memory or claim.share or 0


def _groups(array: Array, now: datetime) -> Iterator[Block]:
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
