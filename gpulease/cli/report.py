"""`gpulease report`: what jobs asked for and used, and how long they waited."""

import csv
import getpass
import io
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Literal

import typer

from gpulease.cli.caller import refuse_unknown_user
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.options import JsonOption
from gpulease.cli.render import print_stdout, show_page, write_stdout
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client import Client, decode, encode
from gpulease.drawing.words import clean, size
from gpulease.errors import BadValue
from gpulease.light_json import indent
from gpulease.units import GIB, counted, format_span, parse_span
from gpulease.wire.usage import (
    PredictionsView,
    ReportView,
    SharesView,
    ShareView,
    UsePartView,
    UseView,
)

_HOUR = 3600.0


def report(
    ctx: typer.Context,
    user: Annotated[
        str | None,
        typer.Option("-u", "--user", metavar="USER", help="Jobs of this user; default: you."),
    ] = None,
    everyone: Annotated[bool, typer.Option("-a", "--all", help="Jobs of all users.")] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="SPAN", help="Only jobs that ended in the last 7d, 12h, or run."
        ),
    ] = None,
    by: Annotated[
        Literal["user", "group", "week", "month"],
        typer.Option("--by", help="What jobs are summed up by.", show_default=False),
    ] = "user",
    shares: Annotated[
        bool,
        typer.Option(
            "--shares", help="The users of the queue: use, share, waits, and whose turn it is."
        ),
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Compare what jobs asked for with what they used, and show how long they waited.

    Jobs that hold memory count up to now. Sizes are means over the time for which memory was
    leased; the use of a job is its peak. UNUSED GIB-HOURS is memory that was leased and never
    needed. Leases with unknown use count as leased only. Waits are those of jobs that got memory
    within --since. Below: how many starts of waiting jobs fell in the range that was shown first,
    and how far off expected starts and predicted run times were.

    --by group sums up by the group under which jobs were submitted: the primary group of their
    user, unless newgrp changed it. It includes all users without --user. --by week and --by month
    sum up by the time at which jobs ended, or now; weeks begin on Monday.

    --shares is about the queue: what each user has used lately and holds, the share that this
    makes, the jobs that wait, and TURN, the order in which the users' next jobs go. Waits are
    those of jobs that got memory in the last 7d, or within --since.

    \b
    Examples:
      gpulease report --since 7d
      gpulease report --all --by week --since 90d
      gpulease report --by group --csv > groups.csv
      gpulease report --shares
      gpulease report --all --json | jq '.users[] | {user, used}'
    """
    if user is not None and everyone:
        raise BadValue(
            "cannot report: --user and --all exclude each other",
            "use one of them",
        )
    _refuse_together(shares=shares, by=by, as_csv=as_csv, json=json)
    span = None if since is None else parse_span(since)
    client = connect(ctx, socket)
    if shares:
        _report_shares(client, user, span, json=json)
        return
    reported = None if everyone or (by == "group" and not user) else user or getpass.getuser()
    reply = client.report_json(reported, None if span is None else span.total_seconds(), by)
    if json:
        print_stdout(indent(reply))
        return
    view = decode(ReportView, reply)
    if as_csv:
        write_stdout(csv_of(view))
        return
    if user is not None and not _rows_of(view):
        refuse_unknown_user(user, "report on", "gpulease report --all shows all users")
    within = "" if span is None else f" in the last {format_span(span)}"
    show_page(page(view, within))


def _refuse_together(*, shares: bool, by: str, as_csv: bool, json: bool) -> None:
    """Raises: BadValue, if options exclude each other."""
    if as_csv and json:
        raise BadValue("cannot report: --csv and --json exclude each other", "use one of them")
    if shares and (as_csv or by != "user"):
        option = "--csv" if as_csv else "--by"
        raise BadValue(f"cannot report shares: {option} is not for --shares", "use --json")


def _report_shares(client: Client, user: str | None, span: timedelta | None, *, json: bool) -> None:
    reply = client.shares_json(None if span is None else span.total_seconds())
    view = decode(SharesView, reply)
    if user is not None:
        view.users = [each for each in view.users if each.user == user]
        reply = encode(view)
    if json:
        print_stdout(indent(reply))
    else:
        show_page(shares_page(view))


def shares_page(view: SharesView) -> Page:
    """Lay out the users of the queue."""
    if not view.users:
        return [line("no user has used or waits for memory", "dim")]
    columns = (
        Column("TURN", right=True),
        Column("USER", wraps=True),
        Column("SHARE", right=True),
        Column("GIB-HOURS", right=True, leaves=4, below="GiB-hours: "),
        Column("HELD", right=True, leaves=3, below="held "),
        Column("RUNNING", right=True, leaves=2, below="running: "),
        Column("WAITING", right=True),
        Column("NEXT JOB", right=True, leaves=1, below="next job: "),
        Column("MEAN WAIT", right=True, leaves=5, below="mean wait: "),
        Column("LONGEST WAIT", right=True, leaves=6, below="longest wait: "),
    )
    table = Table(columns, tuple(_share_row(each) for each in view.users))
    half_life = format_span(timedelta(seconds=view.half_life))
    return [table, line(f"GiB-hours count half after {half_life}; policy: {view.policy}", "dim")]


def _share_row(each: ShareView) -> tuple[Line, ...]:
    return (
        line("" if each.turn is None else str(each.turn)),
        line(clean(each.user)),
        line(f"{100 * each.share:.0f}%"),
        line(_gib_hours(each.use)),
        line(size(each.held) if each.held else ""),
        line(str(each.running)),
        line(str(each.waiting)),
        line(clean(each.next_job or "")),
        line(_wait(each.mean_wait)),
        line(_wait(each.longest_wait)),
    )


def _wait(seconds: float | None) -> str:
    return "" if seconds is None else format_span(timedelta(seconds=seconds))


def page(view: ReportView, within: str = "") -> Page:
    """Lay out a report; `within` names the span of time that it covers."""
    if not (rows := _rows_of(view)):
        return [line(f"no jobs have held memory{within}", "dim")]
    columns = (
        Column(_TITLES.get(view.by, "USER"), wraps=True),
        Column("JOBS", right=True),
        Column("MEAN LEASE", right=True, leaves=1, below="mean lease: "),
        Column("MEAN USE", right=True),
        Column("USED", right=True),
        Column("LEASED GIB-HOURS", right=True, leaves=5, below="GiB-hours leased: "),
        Column("USED GIB-HOURS", right=True, leaves=4, below="used: "),
        Column("UNUSED GIB-HOURS", right=True, leaves=3, below="unused: "),
        Column("MEAN WAIT", right=True, leaves=2, below="mean wait: "),
        Column("LONGEST WAIT", right=True, leaves=6, below="longest wait: "),
        Column("OUT OF MEMORY", right=True, leaves=7, below="out of memory: "),
    )
    table = Table(columns, tuple(_row(name, use) for name, use in rows))
    return [table, *(line(text, "dim") for text in _predictions(view.predictions))]


_TITLES = {"group": "GROUP", "week": "WEEK FROM", "month": "MONTH"}


def _rows_of(view: ReportView) -> list[tuple[str, UseView | UsePartView]]:
    """Return the user, group, week or month of each row, and the row."""
    parts = [
        (each.name[:7] if view.by == "month" else clean(each.name), each) for each in view.parts
    ]
    return [*((clean(each.user), each) for each in view.users), *parts]


def csv_of(view: ReportView) -> str:
    """Return a report as CSV: its rows, with sizes in GiB-hours and waits in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((view.by, *_CSV))
    for name, use in _rows_of(view):
        sizes = (round(each / GIB / _HOUR, 6) for each in (use.asked, use.used, use.unused))
        waits = (
            "" if each is None else round(each, 3) for each in (use.mean_wait, use.longest_wait)
        )
        hours = round(use.gpu_seconds / _HOUR, 6)
        writer.writerow((name, use.jobs, use.out_of_memory, hours, *sizes, *waits))
    return text.getvalue()


_CSV = (
    "jobs",
    "out_of_memory",
    "gpu_hours",
    "leased_gib_hours",
    "used_gib_hours",
    "unused_gib_hours",
    "mean_wait_s",
    "longest_wait_s",
)


def _predictions(errors: PredictionsView | None) -> Iterator[str]:
    """Say how good predictions were, where there were any."""
    if errors is None:
        return
    if errors.ranges:
        share = round(100 * errors.in_range / errors.ranges)
        of_all = f"{errors.in_range} of {counted(errors.ranges, 'job')}"
        yield f"{share}% of the starts were in the range that was shown first ({of_all})"
    if errors.start_error is not None:
        yield f"expected starts were off by {_median(errors.start_error, errors.starts)}"
    if errors.run_error is not None:
        yield f"predicted run times were off by {_median(errors.run_error, errors.runs)}"


def _median(error: float, jobs: int) -> str:
    return f"{format_span(timedelta(seconds=error))} (median of {counted(jobs, 'job')})"


def _row(name: str, use: UseView | UsePartView) -> tuple[Line, ...]:
    measured = use.asked if use.measured is None else use.measured
    seconds = use.gpu_seconds if use.measured_seconds is None else use.measured_seconds
    return (
        line(name),
        line(str(use.jobs)),
        line(_mean(use.asked, use.gpu_seconds)),
        line(_mean(use.used, seconds)),
        line(f"{round(100 * use.used / measured)}%" if measured else ""),
        line(_gib_hours(use.asked)),
        line(_gib_hours(use.used) if measured else ""),
        line(_gib_hours(use.unused) if measured else ""),
        line(_wait(use.mean_wait)),
        line(_wait(use.longest_wait)),
        line(str(use.out_of_memory)),
    )


def _mean(byte_seconds: float, seconds: float) -> str:
    return size(int(byte_seconds / seconds)) if seconds else ""


def _gib_hours(byte_seconds: float) -> str:
    return f"{byte_seconds / GIB / _HOUR:.2f}"
