"""`gpulease history`: past jobs, as a table or as a trace for `gpulease replay`."""

import csv
import io
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated

import typer

from gpulease.cli.caller import environment, is_user
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import UNKNOWN, between, clean, clock, instant, named, size
from gpulease.cli.render import print_stdout, screen_of, show_page
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client import Client, encode
from gpulease.errors import BadValue
from gpulease.light_json import indent
from gpulease.units import MIB, parse_span
from gpulease.wire.requests import spoken
from gpulease.wire.usage import HistoryView, PastJobView

_PAGE = 1000
_FEW = 50
COLUMNS = (
    "job",
    "submit_s",
    "duration_s",
    "gpus",
    "memory_mib",
    "user",
    "time_limit_s",
    "utilization",
    "command",
)


def history(
    ctx: typer.Context,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Only jobs of this user.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="SPAN", help="All that ended in the last 30d, 12h."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=10**9,
            help="The latest N jobs; default: 50, or all with --since or --csv.",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a trace that gpulease replay reads.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """List past jobs, the newest first: how long they waited and ran, and how they ended.

    --csv prints those that held memory, in the columns that gpulease replay reads: times in
    seconds since 1970, the memory leased on each GPU, digests in the place of commands.

    \b
    Examples:
      gpulease history
      gpulease history --user alice --since 7d
      gpulease history --csv --since 30d > month.csv
      gpulease history --json --limit 1000 | jq '.jobs[] | {label, outcome}'
    """
    if as_csv and json:
        raise BadValue("cannot list jobs: --csv and --json exclude each other", "use one of them")
    is_cut = limit is None and since is None and not as_csv
    limit = _FEW if is_cut else limit
    ago = None if since is None else parse_span(since).total_seconds()
    client = connect(ctx, socket)
    if as_csv:
        _print_csv(_past_jobs(client, user, ago, limit))
        return
    view = _view(client, user, ago, limit)
    if json:
        print_stdout(indent(encode(view)))
        return
    if user is not None and not view.jobs and not is_user(user):
        raise BadValue(
            f"cannot list jobs of {user[:80]!r}: no such user",
            "gpulease history shows the jobs of all users",
        )
    now, more = datetime.now(UTC).astimezone(), is_cut and view.before is not None
    show_page(page(view.jobs, now, more=more), screen_of(sys.stdout, environment()))


def _view(client: Client, user: str | None, since: float | None, limit: int | None) -> HistoryView:
    """Return at most `limit` jobs, and whether others follow."""
    found = list(_past_jobs(client, user, since, None if limit is None else limit + 1))
    jobs = found[:limit]
    return HistoryView(jobs, jobs[-1].id if len(found) > len(jobs) else None)


def _past_jobs(
    client: Client, user: str | None, since: float | None, limit: int | None
) -> Iterator[PastJobView]:
    return islice(_pages(client, user, since, min(limit or _PAGE, _PAGE)), limit)


def _pages(
    client: Client, user: str | None, since: float | None, most: int
) -> Iterator[PastJobView]:
    before: int | None = None
    while True:
        view = client.history(user, since, before=before, limit=most)
        yield from view.jobs
        if (before := view.before) is None:
            return


def _print_csv(jobs: Iterator[PastJobView]) -> None:
    print_stdout(",".join(COLUMNS))
    while some := list(islice(jobs, _PAGE)):
        text = trace_of(some)
        if text:
            print_stdout(text)


def trace_of(jobs: list[PastJobView]) -> str:
    """Return the jobs that held memory as lines of a trace."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for job in jobs:
        if job.granted_at is None or job.memory is None:
            continue
        submitted, granted, ended = map(_seconds, (job.submitted_at, job.granted_at, job.ended_at))
        writer.writerow(
            (
                job.label,
                submitted,
                # The clock of the machine may have been set.
                max(0, round(ended - granted, 3)),
                job.gpus,
                # Rounded up: a job needs what it leased.
                -(-job.memory // MIB),
                job.user,
                "" if job.time_limit is None else f"{job.time_limit:g}",
                "" if job.utilization is None else job.utilization / 100,
                job.command or "",
            )
        )
    return lines.getvalue().rstrip("\n")


def _seconds(written: str) -> float:
    return instant(written).timestamp()


def page(jobs: list[PastJobView], now: datetime, *, more: bool = False) -> Page:
    """Lay out past jobs; `more` if older ones are left out."""
    if not jobs:
        return [line("no job has ended", "dim")]
    columns = (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=1, shrinks=True, below=""),
        Column("REQUEST", right=True, leaves=2, below="request "),
        Column("USED", right=True, leaves=4, below="used "),
        Column("BUSY", right=True, leaves=6),
        Column("SUBMITTED", right=True, leaves=5),
        Column("WAITED", right=True, leaves=3, below="waited "),
        Column("RAN", right=True),
        Column("END"),
        Column("EXIT", right=True),
    )
    table = Table(columns, tuple(_row(job, now) for job in jobs))
    older = f"the latest {len(jobs)} jobs; --limit N or --since SPAN shows older ones"
    return [table, line(older, "dim")] if more else [table]


def _row(job: PastJobView, now: datetime) -> tuple[Line, ...]:
    failed = job.exit_status not in (None, 0)
    amount = size(job.memory)
    return (
        line(clean(job.label)),
        line(clean(job.user)),
        line("(hold)" if job.kind == "hold" else named(job)),
        line(f"{job.gpus} x {amount}" if job.gpus > 1 else amount),
        line(size(job.used)),
        line(UNKNOWN if job.utilization is None else f"{job.utilization}%"),
        line(clock(job.submitted_at, now)),
        line(between(job.submitted_at, job.granted_at or job.ended_at, now)),
        line(between(job.granted_at, job.ended_at, now)),
        line(spoken(job.outcome or "ended"), "bad" if failed else "dim"),
        line(UNKNOWN if job.exit_status is None else str(job.exit_status), "bad" if failed else ""),
    )
