"""`gpulease list`: jobs, one on a line."""

import json as json_module
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

import typer

from gpulease.cli.caller import environment, is_user
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import (
    SUSPENDED,
    UNKNOWN,
    alike,
    between,
    clean,
    clock,
    ids_of,
    label,
    named,
    requested,
)
from gpulease.cli.render import print_stdout, screen_of, show_page
from gpulease.cli.tables import Column, Line, Page, Style, Table, line
from gpulease.client import decode
from gpulease.errors import BadValue
from gpulease.light_json import indent
from gpulease.wire.jobs import JobList, JobState, JobView
from gpulease.wire.requests import spoken

_STYLES: dict[str, Style] = {"active": "good", "ended": "dim"}
_STATES = frozenset(get_args(JobState))
Asked = Literal[
    "queued",
    "granted",
    "active",
    "suspended",
    "releasing",
    "ended",
    "exited",
    "failed",
    "signaled",
    "released",
    "cancelled",
    "time-limit",
    "over-lease",
    "idle",
    "gave-up",
    "preempted",
    "requeued",
    "dependency-failed",
    "launch-failed",
    "lost",
]
"""A state or an outcome; `failed` is any end without success."""
_STATE_OF = {SUSPENDED: "active"}
"""What to ask the daemon for: suspended jobs are active ones to it."""
_NOT_FAILED = frozenset({"released", "cancelled", "gave_up", "preempted", "requeued"})


def list(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Include ended jobs.")] = False,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Only jobs of this user.")
    ] = None,
    state: Annotated[
        Asked | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only jobs in this state, or with this end: queued, failed, lost.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """List jobs, oldest first: those that wait or run, and with --all those that have ended.

    STATE is queued, granted, active, suspended (stopped by Ctrl-Z), releasing or ended,
    or how a job ended: exited, failed, signaled, released, cancelled, time-limit,
    over-lease, idle, gave-up, preempted, requeued, dependency-failed, launch-failed,
    lost.

    \b
    Examples:
      gpulease list
      gpulease list --all --user alice
      gpulease list --state queued
      gpulease list --state failed --json | jq '.jobs[].id'
    """
    client = connect(ctx, socket)
    # --state lost includes ended jobs without --all.
    at = state if state is None or state in _STATES else _STATE_OF.get(state, "ended")
    reply = client.jobs_json(everything=everything or at == "ended", user=user, state=at)
    if state is not None and at != state:
        reply = _only(reply, state)
    if json:
        print_stdout(indent(reply))
        return
    if user is not None and not decode(JobList, reply).jobs and not is_user(user):
        raise BadValue(
            f"cannot list jobs of {user[:80]!r}: no such user",
            "gpulease list --all shows the jobs of all users",
        )
    now = datetime.now(UTC).astimezone()
    show_page(page(decode(JobList, reply), now), screen_of(sys.stdout, environment()))


def _only(reply: bytes, wanted: str) -> bytes:
    """Return the reply with the jobs that are suspended, or ended in one way."""
    listed = json_module.loads(reply)
    listed["jobs"] = [job for job in listed["jobs"] if _matches(job, wanted)]
    return json_module.dumps(listed, ensure_ascii=False).encode()


def _matches(job: dict[str, Any], wanted: str) -> bool:
    if wanted == SUSPENDED:
        return bool(job.get("suspended"))
    if wanted == "failed":
        return job["outcome"] not in _NOT_FAILED and job["exit_status"] != 0
    return bool(spoken(job["outcome"] or "") == wanted)


def page(listed: JobList, now: datetime) -> Page:
    """Lay out a listing."""
    if not listed.jobs:
        return [line("no jobs", "dim")]
    # Only where a job waits: most listings are of jobs that run or have ended.
    waiting = any(job.expected_start_at for job in listed.jobs)
    columns = (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=1, shrinks=True, below=""),
        Column("STATE"),
        Column("REQUEST", right=True, leaves=3, below="request "),
        Column("SUBMITTED", right=True, leaves=5),
        *((Column("EXPECTED", right=True, leaves=4, below="expected "),) if waiting else ()),
        Column("RAN", right=True, leaves=4, below="ran "),
        Column("EXIT", right=True),
        Column("COMMAND", leaves=6, shrinks=True, least=16),
    )
    return [
        Table(columns, tuple(_row(group, now, waiting=waiting) for group in alike(listed.jobs)))
    ]


def _style(job: JobView) -> Style:
    return "warn" if job.suspended else _STYLES.get(job.state, "warn")


def _row(group: Sequence[JobView], now: datetime, *, waiting: bool) -> tuple[Line, ...]:
    job = group[0]
    failed = job.exit_status not in (None, 0)
    return (
        line(ids_of(group)),
        line(clean(job.user)),
        line(named(job)),
        line(label(job), "bad" if failed else _style(job)),
        line(requested(job)),
        line(clock(job.submitted_at, now)),
        *((line(clock(job.expected_start_at, now)),) if waiting else ()),
        line(between(job.started_at, job.ended_at, now)),
        line(UNKNOWN if job.exit_status is None else str(job.exit_status), "bad" if failed else ""),
        line(clean(job.command)),
    )
