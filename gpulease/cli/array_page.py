"""The page of `gpulease show` about a whole array: how many elements are in which state."""

from __future__ import annotations

from gpulease.cli.tables import Block, Column, Hanging, Line, Page, Span, Table, line
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
from gpulease.wire.text import has_failed, ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from gpulease.wire.jobs import ClaimView, JobView

_LABELS = 12
_MOST_ROWS = 30
_RUNNING = ("granted", "active", "releasing")


def page(elements: Sequence[JobView], now: datetime) -> Page:
    """Lay out an array; of an element that was tried again only the last attempt counts."""
    first = elements[0]
    last_tries = {job.queue.array_index: job for job in elements if job.queue is not None}
    return [
        (Span(f"array {first.id}", "title"), Span(f"  {named(first)}")),
        *(_pair(name, text) for name, text in _fields(first, list(last_tries.values()), now)),
        *_groups(list(last_tries.values()), now),
    ]


def _pair(name: str, text: str) -> Block:
    return Hanging((Span(f"  {name:<{_LABELS}}", "dim"), Span(text)), _LABELS + 2)


def _fields(
    first: JobView, elements: Sequence[JobView], now: datetime
) -> Iterator[tuple[str, str]]:
    most = None if first.queue is None else first.queue.array_most
    indices = sorted(job.queue.array_index or 0 for job in elements if job.queue is not None)
    yield "elements", f"{len(elements)}: {ranges(indices)}"
    yield "state", _counted(elements)
    if most is not None:
        yield "at once", f"at most {most}"
    yield "user", clean(first.user)
    yield "command", clean(first.command)
    yield "asks", _requested(elements)
    yield "submitted", clock(first.submitted_at, now)


def _requested(elements: Sequence[JobView]) -> str:
    """Write what the elements ask for: 4G, or 4G to 6G after an edit of some."""
    sizes = {requested(job): job.claim for job in elements}
    ordered = sorted(sizes, key=lambda text: _amount(sizes[text]))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _amount(claim: ClaimView) -> tuple[int, float]:
    return claim.gpus, claim.memory or claim.share or 0


def _counted(elements: Sequence[JobView]) -> str:
    """Count the elements by state; those that ended by whether they succeeded."""
    counts = {
        "queued": sum(job.state == "queued" for job in elements),
        "running": sum(job.state in _RUNNING for job in elements),
        "succeeded": sum(job.exit_status == 0 for job in elements),
        "failed": sum(map(has_failed, elements)),
        "stopped": sum(
            job.state == "ended" and job.exit_status != 0 and not has_failed(job)
            for job in elements
        ),
    }
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _groups(elements: Sequence[JobView], now: datetime) -> Iterator[Block]:
    """Show a row for the elements that have one state and one reason, running ones first."""
    groups: dict[tuple[object, ...], list[JobView]] = {}
    for job in elements:
        key: tuple[object, ...] = label(job), job.exit_status, reason_of(job, now)
        groups.setdefault((*key, job.id) if job.state in _RUNNING else key, []).append(job)
    rows = sorted(groups.values(), key=lambda group: group[0].state not in _RUNNING)
    columns = (
        Column("JOB", right=True),
        Column("STATE"),
        Column("COUNT", right=True),
        Column("RAN", right=True),
        Column("EXIT", right=True),
        Column("REASON", wraps=True, least=20, below=""),
    )
    yield line("")
    yield Table(columns, tuple(_row(group, now) for group in rows[:_MOST_ROWS]))
    if len(rows) > _MOST_ROWS:
        yield line(f"and {len(rows) - _MOST_ROWS} more rows; gpulease show --json has all", "dim")


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
