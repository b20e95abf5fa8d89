"""`gpulease report`: what jobs asked for and used, by user."""

import getpass
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated

import typer

from gpulease.cli.caller import environment, is_user
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import UNKNOWN, clean, size
from gpulease.cli.render import print_stdout, screen_of, show_page
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client import decode, indent
from gpulease.errors import BadValue
from gpulease.units import GIB, format_span, parse_span
from gpulease.wire.views import PredictionsView, ReportView, UseView

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
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """Compare what ended jobs asked for with what they used.

    The sizes are means over the time for which memory was leased. Jobs with
    unknown use do not count. Below: how good the expected starts of waiting jobs
    and the predicted run times were.

    \b
    Examples:
      gpulease report --since 7d
      gpulease report --all --json | jq '.users[] | {user, used}'
    """
    if user is not None and everyone:
        raise BadValue(
            "cannot report: --user and --all exclude each other",
            "use one of them",
        )
    span = None if since is None else parse_span(since)
    client = connect(ctx, socket)
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
    share = f"{round(100 * use.used / use.asked)}%" if use.asked else UNKNOWN
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
    return size(int(byte_seconds / seconds)) if seconds else UNKNOWN


def _gib_hours(byte_seconds: float) -> str:
    return f"{byte_seconds / GIB / _HOUR:.2f}"
