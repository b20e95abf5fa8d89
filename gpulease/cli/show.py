"""`gpulease show`: all about one job."""

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Annotated, get_args

import typer

from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.facts import facts, gpu_of
from gpulease.cli.render import screen_of, show_page
from gpulease.cli.render import show as show_text
from gpulease.cli.tables import Block, Column, Hanging, Page, Span, Table, line
from gpulease.cli.text import (
    clean,
    clock,
    index_of,
    instant,
    named,
    size,
)
from gpulease.client import Client, decode, indent
from gpulease.errors import GpuleaseError
from gpulease.wire import EventView, JobView, LeaseView, Outcome, spoken

_LABELS = 12
_A_SHORT_STORY = timedelta(hours=1)
_LIMITS = {
    "driver": "the driver",
    "framework": "its framework (TensorFlow, PyTorch, JAX, CuPy)",
    "watch": "a watch on what it uses",
    "devices": "device rules",
}
"""What may hold a job to its lease, as people would say it."""


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
    client = connect(ctx, socket)
    reply = client.job_json(job)
    if json:
        show_text(indent(reply))
        return
    now = datetime.now(UTC).astimezone()
    view = decode(JobView, reply)
    shown = page(view, now, _indexes(client, view))
    show_page(shown, screen_of(sys.stdout, environment()))


def _indexes(client: Client, job: JobView) -> Mapping[str, str]:
    """Return the index of each GPU by its UUID; none where nobody needs them, or can tell."""
    if not job.leases:
        return {}
    try:
        return {gpu.uuid: index_of(gpu) for gpu in client.status().gpus}
    except GpuleaseError:
        return {}


def page(job: JobView, now: datetime, indexes: Mapping[str, str] = MappingProxyType({})) -> Page:
    """Lay out one job; a GPU of which the index is not known is shown by its UUID."""
    return [
        (Span(f"job {job.id}", "title"), Span(f"  {named(job)}")),
        *(_pair(name, text) for name, text in facts(job, now, indexes) if text),
        *_leases(job, indexes),
        *_unheld(job),
        *_pools(job, indexes),
        *_refusals(job),
        *_events(job, now),
    ]


def _pair(name: str, text: str) -> Block:
    return Hanging((Span(f"  {name:<{_LABELS}}", "dim"), Span(text)), _LABELS + 2)


def _pools(job: JobView, indexes: Mapping[str, str]) -> Iterator[Block]:
    rows = [
        (
            line(gpu_of(clean(lease.gpu), indexes)),
            line(f"{clean(pool.framework)} {clean(pool.version)}"),
            line(size(pool.limit)),
            line(size(pool.peak)),
            line(size(pool.charged)),
            line(size(pool.beside)),
        )
        for lease in job.leases
        for pool in lease.pools
    ]
    if not rows:
        return
    columns = (
        Column("POOL ON", wraps=True, least=20),
        Column("OF", wraps=True),
        Column("LIMIT", right=True, leaves=3, below="limit: "),
        Column("PEAK", right=True),
        Column("KEPT BESIDE", right=True, leaves=1, below="kept beside it: "),
        Column("SEEN BESIDE", right=True, leaves=1, below="seen beside it: "),
    )
    yield line("")
    yield Table(columns, tuple(rows))


def _leases(job: JobView, indexes: Mapping[str, str]) -> Iterator[Block]:
    if not job.leases:
        return
    columns = (
        Column("LEASE ON", wraps=True, least=20),
        Column("MEMORY", right=True),
        Column("USED", right=True),
        Column("PEAK", right=True),
        Column("LIMITED BY", leaves=1, wraps=True, below="limited by: "),
    )
    rows = (
        (
            line(gpu_of(clean(lease.gpu), indexes)),
            line(size(lease.memory)),
            line(size(lease.used)),
            line(size(lease.peak)),
            line(_limits(lease)),
        )
        for lease in job.leases
    )
    yield line("")
    yield Table(columns, tuple(rows))


def _unheld(job: JobView) -> Iterator[Block]:
    """Name the processes on a GPU that the framework hook does not reach."""
    for each in job.unheld:
        who = f"process {each.pid} ({clean(each.command)})"
        said = f"{who} is not held by the framework hook: {clean(each.why)}"
        yield Hanging(line(said, "warn"), 2)


def _limits(lease: LeaseView) -> str:
    """Say what holds the job to its lease; what a later daemon may name stays as it is."""
    limit = lease.driver_limit
    known = _LIMITS if limit is None else {**_LIMITS, "driver": f"the driver, at {size(limit)}"}
    named = (known.get(each, clean(each)) for each in lease.enforced_by)
    return ", ".join(named) or "nothing, it is placed and counted only"


def _refusals(job: JobView) -> Iterator[Block]:
    if not job.refusals:
        return
    columns = (Column("GPU", right=True), Column("WHY NOT NOW", wraps=True, least=16))
    rows = ((line(index_of(refusal)), line(clean(refusal.why))) for refusal in job.refusals)
    yield line("")
    yield Table(columns, tuple(rows))


def _events(job: JobView, now: datetime) -> Iterator[Block]:
    if not job.events:
        return
    columns = (
        Column("WHEN"),
        Column("EVENT"),
        Column("DETAIL", wraps=True, leaves=1, least=16, below=""),
    )
    # Of a story within an hour, and of what was just now, seconds matter.
    begins, *_, ends = (instant(event.at) for event in (job.events[0], *job.events))
    short = ends - begins < _A_SHORT_STORY
    rows = (
        (
            line(clock(event.at, now, seconds=short or now - instant(event.at) < _A_SHORT_STORY)),
            line(clean(spoken(event.kind))),
            line(_detail(event)),
        )
        for event in job.events
    )
    yield line("")
    yield Table(columns, tuple(rows))


def _detail(event: EventView) -> str:
    detail = event.detail or ""
    return clean(spoken(detail) if detail in get_args(Outcome) else detail)
