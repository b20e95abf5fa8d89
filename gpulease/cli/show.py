"""`gpulease show`: all about one job."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.render import screen_of, show_page
from gpulease.cli.render import show as show_text
from gpulease.cli.tables import Block, Column, Page, Span, Table, line
from gpulease.cli.text import asks, between, clean, clock, label, ordinal, sentence, size, until
from gpulease.client import decode, indent
from gpulease.units import format_span
from gpulease.wire import JobView

_LABELS = 12


def show(
    ctx: typer.Context,
    job: Annotated[int, typer.Argument(metavar="JOB", help="The id of a job.")],
    json: Annotated[bool, typer.Option("--json", help="Print what the daemon says.")] = False,
    socket: SocketOption = None,
) -> None:
    """Show all about a job: what it asked for and got, why it waits, what has happened to it.

    \b
    Examples:
      gpulease show 17
      gpulease show --json 17 | jq .exit_status
    """
    reply = connect(ctx, socket).job_json(job)
    if json:
        show_text(indent(reply))
        return
    now = datetime.now(UTC).astimezone()
    show_page(page(decode(JobView, reply), now), screen_of(sys.stdout, environment()))


def page(job: JobView, now: datetime) -> Page:
    """Lay out one job."""
    return [
        (Span(f"job {job.id}", "title"), Span(f"  {clean(job.name)}")),
        *(_pair(name, text) for name, text in _facts(job, now) if text),
        *_leases(job),
        *_refusals(job),
        *_events(job, now),
    ]


def _pair(name: str, text: str) -> Block:
    return (Span(f"  {name:<{_LABELS}}", "dim"), Span(text))


def _facts(job: JobView, now: datetime) -> Iterator[tuple[str, str | None]]:
    yield "state", _state(job)
    yield "why", sentence(job.reason, job.hint) if job.reason else None
    yield "waits for", ", ".join(f"job {number}" for number in job.waits_for)
    yield "starts by", clock(job.expected_start_at, now) if job.expected_start_at else None
    yield "user", clean(job.user)
    yield "command", clean(job.command)
    yield "asked for", _asked(job)
    yield "submitted", clock(job.submitted_at, now)
    yield "started", clock(job.started_at, now) if job.started_at else None
    yield "ended", clock(job.ended_at, now) if job.ended_at else None
    yield "ran for", between(job.started_at, job.ended_at, now) if job.started_at else None
    ends = job.expires_at if job.state != "ended" else None
    yield "time left", f"{until(ends, now)} (until {clock(ends, now)})" if ends else None
    yield "exit status", None if job.exit_status is None else str(job.exit_status)
    yield "process", None if job.pid is None or job.state == "ended" else str(job.pid)


def _state(job: JobView) -> str:
    if job.state == "queued" and job.position:
        return f"queued, {ordinal(job.position)} in line"
    return label(job) if job.state != "ended" else f"ended: {label(job)}"


def _asked(job: JobView) -> str:
    limit = job.claim.time_limit
    if limit is None:
        return asks(job)
    from datetime import timedelta

    return f"{asks(job)} for at most {format_span(timedelta(seconds=limit))}"


def _leases(job: JobView) -> Iterator[Block]:
    if not job.leases:
        return
    columns = (
        Column("LEASE ON", shrinks=True),
        Column("MEMORY", right=True),
        Column("USED", right=True),
        Column("PEAK", right=True),
        Column("LIMITS", leaves=1, shrinks=True),
    )
    rows = (
        (
            line(clean(lease.gpu)),
            line(size(lease.memory)),
            line(size(lease.used)),
            line(size(lease.peak)),
            line(", ".join(lease.enforced_by) or "nothing"),
        )
        for lease in job.leases
    )
    yield line("")
    yield Table(columns, tuple(rows))


def _refusals(job: JobView) -> Iterator[Block]:
    if not job.refusals:
        return
    columns = (Column("GPU", right=True), Column("WHY NOT NOW", shrinks=True))
    rows = ((line(str(refusal.index)), line(clean(refusal.why))) for refusal in job.refusals)
    yield line("")
    yield Table(columns, tuple(rows))


def _events(job: JobView, now: datetime) -> Iterator[Block]:
    if not job.events:
        return
    columns = (Column("WHEN"), Column("EVENT"), Column("DETAIL", shrinks=True, leaves=1))
    rows = (
        (line(clock(event.at, now)), line(clean(event.kind)), line(clean(event.detail or "")))
        for event in job.events
    )
    yield line("")
    yield Table(columns, tuple(rows))
