"""`gpulease list`: jobs, one on a line."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.render import screen_of, show, show_page
from gpulease.cli.tables import Column, Line, Page, Style, Table, line
from gpulease.cli.text import UNKNOWN, asks, between, clean, clock, label
from gpulease.client import decode, indent
from gpulease.wire import JobList, JobState, JobView

_STYLES: dict[str, Style] = {"active": "good", "ended": "dim"}


def list(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also jobs that have ended.")] = False,
    user: Annotated[
        str | None, typer.Option("--user", metavar="U", help="Jobs of this user.")
    ] = None,
    state: Annotated[
        JobState | None, typer.Option("--state", help="Jobs in this state.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what the daemon says.")] = False,
    socket: SocketOption = None,
) -> None:
    """List jobs, oldest first: those that wait or run, or with --all every one remembered.

    \b
    Examples:
      gpulease list
      gpulease list --all --user alice
      gpulease list --state queued
    """
    # Whoever asks for the ended ones means to see them.
    reply = connect(ctx, socket).jobs_json(
        everything=everything or state == "ended", user=user, state=state
    )
    if json:
        show(indent(reply))
        return
    now = datetime.now(UTC).astimezone()
    show_page(page(decode(JobList, reply), now), screen_of(sys.stdout, environment()))


def page(listed: JobList, now: datetime) -> Page:
    """Lay out a listing."""
    if not listed.jobs:
        return [line("no jobs", "dim")]
    columns = (
        Column("JOB", right=True),
        Column("USER", shrinks=True),
        Column("NAME", leaves=3, shrinks=True),
        Column("STATE"),
        Column("ASKS", right=True),
        Column("SUBMITTED", right=True, leaves=4),
        Column("RAN", right=True, leaves=2),
        Column("EXIT", right=True, leaves=1),
        Column("COMMAND", leaves=5, shrinks=True),
    )
    return [Table(columns, tuple(_row(job, now) for job in listed.jobs))]


def _row(job: JobView, now: datetime) -> tuple[Line, ...]:
    failed = job.exit_status not in (None, 0)
    return (
        line(str(job.id)),
        line(clean(job.user)),
        line(clean(job.name)),
        line(label(job), "bad" if failed else _STYLES.get(job.state, "warn")),
        line(asks(job)),
        line(clock(job.submitted_at, now)),
        line(between(job.started_at, job.ended_at, now)),
        line(UNKNOWN if job.exit_status is None else str(job.exit_status), "bad" if failed else ""),
        line(clean(job.command)),
    )
