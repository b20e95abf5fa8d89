"""`gpulease report`: what jobs asked for and what they used, by user."""

import getpass
import sys
from typing import Annotated

import typer

from gpulease.cli.caller import environment, is_user
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import UNKNOWN, clean, size
from gpulease.cli.render import screen_of, show, show_page
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client import decode, indent
from gpulease.errors import BadValue
from gpulease.units import GIB, format_span, parse_span
from gpulease.wire.views import ReportView, UseView

_HOUR = 3600.0


def report(
    ctx: typer.Context,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="USER", help="About this user; you, if left out."),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="About every user.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="SPAN", help="Jobs that ended in the last 7d, 12h, 30m."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what the daemon says.")] = False,
    socket: SocketOption = None,
) -> None:
    """Tell what jobs asked for and what they used, as far as their use is known.

    Means are over the time for which the memory was leased.

    \b
    Examples:
      gpulease report --since 7d
      gpulease report --all --json | jq '.users[] | {user, used}'
    """
    if user is not None and everyone:
        raise BadValue(
            "cannot report on one user and on all: --user and --all contradict each other",
            "leave one of them out",
        )
    span = None if since is None else parse_span(since)
    client = connect(ctx, socket)
    about = None if everyone else user or getpass.getuser()
    reply = client.report_json(about, None if span is None else span.total_seconds())
    if json:
        show(indent(reply))
        return
    if user is not None and not decode(ReportView, reply).users and not is_user(user):
        raise BadValue(
            f"cannot report on {user[:80]!r}: this machine has no such user",
            "gpulease report --all shows whose jobs have ended",
        )
    within = "" if span is None else f" in the last {format_span(span)}"
    shown = page(decode(ReportView, reply), within)
    show_page(shown, screen_of(sys.stdout, environment()))


def page(told: ReportView, within: str = "") -> Page:
    """Lay out a report; `within` says over which time it is."""
    if not told.users:
        return [line(f"no jobs ended{within} of which the use is known", "dim")]
    columns = (
        Column("USER", wraps=True),
        Column("JOBS", right=True),
        Column("ASKED", right=True),
        Column("USED", right=True),
        Column("OF IT", right=True),
        Column("GIB-HOURS ASKED", right=True, leaves=2, below="GiB-hours asked: "),
        Column("USED", right=True, leaves=2, below="GiB-hours used: "),
        Column("OUT OF MEMORY", right=True, leaves=1, below="out of memory: "),
    )
    return [Table(columns, tuple(_row(use) for use in told.users))]


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
