"""`gpulease report`: what jobs asked for and used, by user."""

import getpass
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated

import typer

from gpulease.cli.caller import environment, is_user
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import clean, size
from gpulease.cli.render import print_stdout, screen_of, show_page
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client import Client, decode, encode
from gpulease.errors import BadValue
from gpulease.light_json import indent
from gpulease.units import GIB, format_span, parse_span
from gpulease.wire.usage import PredictionsView, ReportView, SharesView, ShareView, UseView

_HOUR = 3600.0


def report(
    ctx: typer.Context,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="USER", help="Jobs of this user; default: you."),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Jobs of all users.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="SPAN", help="Only jobs of the last 7d, 12h, 30m."),
    ] = None,
    shares: Annotated[
        bool,
        typer.Option(
            "--shares", help="The users of the queue: use, share, waits, and whose turn it is."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """Compare what ended jobs asked for with what they used.

    The sizes are means over the time for which memory was leased. Jobs with
    unknown use do not count. Below: how good the expected starts of waiting jobs
    and the predicted run times were.

    --shares is about the queue: what each user has used lately and holds, the share that this
    makes, the jobs that wait, and TURN, the order in which the users' next jobs go. Waits are
    those of jobs that started in the last 7d, or within --since.

    \b
    Examples:
      gpulease report --since 7d
      gpulease report --shares
      gpulease report --all --json | jq '.users[] | {user, used}'
    """
    if user is not None and everyone:
        raise BadValue(
            "cannot report: --user and --all exclude each other",
            "use one of them",
        )
    span = None if since is None else parse_span(since)
    client = connect(ctx, socket)
    if shares:
        _report_shares(client, user, span, json=json)
        return
    reported = None if everyone else user or getpass.getuser()
    reply = client.report_json(reported, None if span is None else span.total_seconds())
    if json:
        print_stdout(indent(reply))
        return
    if user is not None and not decode(ReportView, reply).users and not is_user(user):
        raise BadValue(
            f"cannot report on {user[:80]!r}: no such user",
            "gpulease report --all shows all users",
        )
    within = "" if span is None else f" in the last {format_span(span)}"
    shown = page(decode(ReportView, reply), within)
    show_page(shown, screen_of(sys.stdout, environment()))


def _report_shares(client: Client, user: str | None, span: timedelta | None, *, json: bool) -> None:
    reply = client.shares_json(None if span is None else span.total_seconds())
    view = decode(SharesView, reply)
    if user is not None:
        view.users = [each for each in view.users if each.user == user]
        reply = encode(view)
    if json:
        print_stdout(indent(reply))
    else:
        show_page(shares_page(view), screen_of(sys.stdout, environment()))


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
    if not view.users:
        return [line(f"no jobs with known use have ended{within}", "dim")]
    columns = (
        Column("USER", wraps=True),
        Column("JOBS", right=True),
        Column("REQUESTED", right=True),
        Column("USED", right=True),
        Column("SHARE", right=True),
        Column("GIB-HOURS REQUESTED", right=True, leaves=3, below="GiB-hours requested: "),
        Column("GIB-HOURS USED", right=True, leaves=2, below="GiB-hours used: "),
        Column("OUT OF MEMORY", right=True, leaves=1, below="out of memory: "),
    )
    table = Table(columns, tuple(_row(use) for use in view.users))
    return [table, *(line(text, "dim") for text in _predictions(view.predictions))]


def _predictions(errors: PredictionsView | None) -> Iterator[str]:
    """Say how good predictions were, where there were any."""
    if errors is None:
        return
    if errors.start_error is not None:
        yield f"expected starts were off by {_median(errors.start_error, errors.starts)}"
    if errors.run_error is not None:
        yield f"predicted run times were off by {_median(errors.run_error, errors.runs)}"


def _median(error: float, jobs: int) -> str:
    count = "1 job" if jobs == 1 else f"{jobs} jobs"
    return f"{format_span(timedelta(seconds=error))} (median of {count})"


def _row(use: UseView) -> tuple[Line, ...]:
    share = f"{round(100 * use.used / use.asked)}%" if use.asked else ""
    return (
        line(clean(use.user)),
        line(str(use.jobs)),
        line(_mean(use.asked, use.gpu_seconds)),
        line(_mean(use.used, use.gpu_seconds)),
        line(share),
        line(_gib_hours(use.asked)),
        line(_gib_hours(use.used)),
        line(str(use.out_of_memory)),
    )


def _mean(byte_seconds: float, seconds: float) -> str:
    return size(int(byte_seconds / seconds)) if seconds else ""


def _gib_hours(byte_seconds: float) -> str:
    return f"{byte_seconds / GIB / _HOUR:.2f}"
