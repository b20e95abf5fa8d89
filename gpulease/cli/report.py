"""What jobs asked for and used, and how long they waited, for `gpulease report`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli.light_connection import light_client
from gpulease.cli.render import own_name, print_stdout, show_page, write_stdout
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client.light_client import read
from gpulease.drawing.words import clean, gib_hours, size
from gpulease.errors import BadValue
from gpulease.light_json import encode, indent
from gpulease.units import GIB, counted, format_span, parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpulease.client.light_client import LightClient
    from gpulease.wire.usage import (
        PredictionsView,
        ReportView,
        SharesView,
        ShareView,
        UsePartView,
        UseView,
    )

_HOUR = 3600.0


def print_report(
    *,
    user: str | None,
    everyone: bool,
    since: str | None,
    by: str,
    shares: bool,
    as_csv: bool,
    json: bool,
    socket: Path | str | None,
) -> None:
    """Print what the jobs of the caller, of a user or of all asked for and used."""
    if user is not None and everyone:
        raise BadValue(
            "cannot report: --user and --all exclude each other",
            "use one of them",
        )
    _refuse_together(shares=shares, by=by, as_csv=as_csv, json=json)
    span = None if since is None else parse_span(since)
    client = light_client(socket, "report")
    if shares:
        _report_shares(client, user, span, json=json)
        return
    usual = None if everyone or by == "group" else own_name()
    reported = usual if user is None else user
    reply = client.report_json(reported, None if span is None else span.total_seconds(), by)
    if json:
        print_stdout(indent(reply))
        return
    view: ReportView = read(reply)
    if as_csv:
        write_stdout(csv_of(view))
        return
    if not _rows_of(view):
        _refuse_unknown(user)
    within = "" if span is None else f" in the last {format_span(span)}"
    show_page(page(view, within))


def _refuse_together(*, shares: bool, by: str, as_csv: bool, json: bool) -> None:
    """Raises: BadValue, if options exclude each other."""
    if as_csv and json:
        raise BadValue("cannot report: --csv and --json exclude each other", "use one of them")
    if shares and (as_csv or by != "user"):
        option = "--csv" if as_csv else "--by"
        raise BadValue(f"cannot report shares: {option} is not for --shares", "use --json")


def _report_shares(
    client: LightClient, user: str | None, span: timedelta | None, *, json: bool
) -> None:
    reply = client.shares_json(None if span is None else span.total_seconds())
    view: SharesView = read(reply)
    if user is not None:
        view.users = [each for each in view.users if each.user == user]
        reply = encode(view)
    if json:
        print_stdout(indent(reply))
        return
    if not view.users:
        _refuse_unknown(user)
    show_page(shares_page(view))


def _refuse_unknown(user: str | None) -> None:
    if user is not None:
        from gpulease.cli.caller import refuse_unknown_user

        refuse_unknown_user(user, "report on", "gpulease report --all shows all users")


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
        line(gib_hours(each.use)),
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
        *(_OF_THE_MACHINE if any(use.cpu_seconds is not None for _, use in rows) else ()),
    )
    table = Table(columns, tuple(_row(name, use)[: len(columns)] for name, use in rows))
    return [table, *(line(text, "dim") for text in _predictions(view.predictions))]


_OF_THE_MACHINE = (
    Column("CPU HOURS", right=True, leaves=9, below="CPU hours: "),
    Column("MOST RAM", right=True, leaves=8, below="most RAM: "),
)
_TITLES = {"group": "GROUP", "week": "WEEK FROM", "month": "MONTH"}


def _rows_of(view: ReportView) -> list[tuple[str, UseView | UsePartView]]:
    """Return the user, group, week or month of each row, and the row."""
    parts = [
        (each.name[:7] if view.by == "month" else clean(each.name), each) for each in view.parts
    ]
    return [*((clean(each.user), each) for each in view.users), *parts]


def csv_of(view: ReportView) -> str:
    """Return a report as CSV: its rows, with sizes in GiB-hours and waits in seconds."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((view.by, *_CSV))
    for name, use in _rows_of(view):
        sizes = (round(each / GIB / _HOUR, 6) for each in (use.asked, use.used, use.unused))
        waits = (
            "" if each is None else round(each, 3) for each in (use.mean_wait, use.longest_wait)
        )
        hours = round(use.gpu_seconds / _HOUR, 6)
        cpu = "" if use.cpu_seconds is None else round(use.cpu_seconds / _HOUR, 6)
        ram = "" if use.ram_peak is None else round(use.ram_peak / GIB, 6)
        writer.writerow((name, use.jobs, use.out_of_memory, hours, *sizes, *waits, cpu, ram))
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
    "cpu_hours",
    "most_ram_gib",
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
        line(gib_hours(use.asked)),
        line(gib_hours(use.used) if measured else ""),
        line(gib_hours(use.unused) if measured else ""),
        line(_wait(use.mean_wait)),
        line(_wait(use.longest_wait)),
        line(str(use.out_of_memory)),
        line("" if use.cpu_seconds is None else f"{use.cpu_seconds / _HOUR:.2f}"),
        line("" if use.ram_peak is None else size(use.ram_peak)),
    )


def _mean(byte_seconds: float, seconds: float) -> str:
    return size(int(byte_seconds / seconds)) if seconds else ""
