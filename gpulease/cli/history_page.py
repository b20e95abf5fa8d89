"""The page of `gpulease history`: past jobs, as a table, as JSON, or as a trace."""

from __future__ import annotations

import sys
from _thread import allocate_lock, start_new_thread
from itertools import chain

from gpulease.cli.light_connection import light_client
from gpulease.cli.pager import print_paged
from gpulease.cli.render import drawn, local_time, print_stdout, screen_of, shown, write_stdout
from gpulease.cli.tables import Column, Table, draw_in_pages, line
from gpulease.client.light_client import read
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import amount, clean, clock, instant, named, percent, size
from gpulease.errors import BadValue, NoDaemon
from gpulease.light_json import encode, indent
from gpulease.locations import environment
from gpulease.units import MIB, format_span, parse_span
from gpulease.wire.text import ending, has_failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from pathlib import Path
    from typing import Any

    from gpulease.cli.render import Screen
    from gpulease.cli.tables import Line
    from gpulease.client.light_client import LightClient
    from gpulease.wire.usage import PastJobView

    Jobs = Iterator[Sequence[PastJobView]]
    """Past jobs, in pages."""

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
"""Of a trace."""


def print_history(
    *,
    user: str | None,
    since: str | None,
    state: str | None,
    name: str | None,
    limit: int | None,
    as_csv: bool,
    json: bool,
    socket: Path | str | None,
) -> None:
    """Print the latest past jobs that the filters leave; `limit` None: see `_FEW`."""
    if as_csv and json:
        raise BadValue("cannot list jobs: --csv and --json exclude each other", "use one of them")
    is_cut = limit is None and since is None and not as_csv
    limit = _FEW if is_cut else limit
    asked: dict[str, str | None] = {
        "user": user,
        "since": None if since is None else f"{parse_span(since).total_seconds():.0f}",
        "outcome": None if state in (None, "ended") else state.replace("-", "_"),
        "name": name,
    }
    client = _daemon(socket)
    if client is None:
        _print_of_slurm(asked, since, state, limit, as_csv=as_csv, json=json)
        return
    if as_csv:
        _print_csv(_pages(client, asked, limit))
        return
    if json:
        _print_json(_pages(client, asked, None if limit is None else limit + 1), limit)
        return
    # One more says whether others follow.
    pages = _pages(client, asked, _FEW + 1 if is_cut else limit)
    first = next(pages)
    if user is not None and not first:
        from gpulease.cli.caller import refuse_unknown_user

        hint = "gpulease history shows the jobs of all users"
        refuse_unknown_user(user, "list jobs of", hint)
    screen = screen_of(sys.stdout, environment())
    print_paged(table_text(chain([first], pages), local_time(), screen, _FEW if is_cut else None))


def _daemon(socket: Path | str | None) -> LightClient | None:
    """Return the daemon; None where there is none, and Slurm has the jobs."""
    try:
        return light_client(socket, "history")
    except NoDaemon:
        if acts_on_slurm(socket):
            return None
        raise


def _print_of_slurm(
    asked: dict[str, str | None],
    since: str | None,
    state: str | None,
    limit: int | None,
    *,
    as_csv: bool,
    json: bool,
) -> None:
    from gpulease.slurm.command.list_page import print_ended

    if as_csv:
        raise BadValue(
            "cannot print a trace: no gpuleased runs on this machine, and Slurm keeps no record of "
            "memory",
            "gpulease history --csv on a node prints the jobs that ran there",
        )
    seconds = None if since is None else parse_span(since).total_seconds()
    most = _PAGE if limit is None else limit
    print_ended(asked["user"], seconds, state, asked["name"], most, json=json)


def _pages(client: LightClient, asked: dict[str, str | None], limit: int | None) -> Jobs:
    """Yield pages of at most `limit` jobs in all; the first one may be empty."""
    return ahead(_fetched(client, asked, limit))


def ahead(pages: Jobs) -> Jobs:
    """Yield pages, of which a thread fetches the next one while its caller prints the last."""
    found: list[tuple[Sequence[PastJobView] | None, BaseException | None]] = []
    is_ready = allocate_lock()

    def fetch() -> None:
        try:
            found.append((next(pages, None), None))
        except BaseException as error:  # noqa: BLE001  the caller raises it
            found.append((None, error))
        is_ready.release()

    is_ready.acquire()
    fetch()
    while True:
        is_ready.acquire()
        page, error = found.pop()
        if error is not None:
            raise error
        if page is None:
            return
        # At the end of the command, such a thread is not waited for.
        start_new_thread(fetch, ())
        yield page


def _fetched(client: LightClient, asked: dict[str, str | None], limit: int | None) -> Jobs:
    before: str | None = None
    while limit is None or limit > 0:
        most = _PAGE if limit is None else min(limit, _PAGE)
        view = read(client.history_json({**asked, "before": before, "limit": str(most)}))
        yield view.jobs
        if view.before is None:
            return
        before = str(view.before)
        limit = None if limit is None else limit - len(view.jobs)


def _print_json(pages: Jobs, limit: int | None) -> None:
    """Print at most `limit` jobs, and whether others follow."""
    found = list(chain.from_iterable(pages))
    jobs = found[:limit]
    view = {"jobs": jobs, "before": jobs[-1].id if len(found) > len(jobs) else None}
    print_stdout(indent(encode(view)))


def _print_csv(pages: Jobs) -> None:
    print_stdout(",".join(COLUMNS))
    for jobs in pages:
        write_stdout(trace_of(jobs))


def trace_of(jobs: Sequence[PastJobView]) -> str:
    """Return the jobs that held memory as lines of a trace."""
    import csv
    import io

    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerows(_traced(job) for job in jobs if job.granted_at and job.memory is not None)
    return lines.getvalue()


def _traced(job: PastJobView) -> tuple[Any, ...]:
    submitted = instant(job.submitted_at).timestamp()
    granted = instant(job.granted_at or "").timestamp()
    return (
        job.label,
        submitted,
        # The clock of the machine may have been set.
        max(0, round(instant(job.ended_at).timestamp() - granted, 3)),
        job.gpus,
        # Rounded up: a job needs what it leased.
        -(-(job.memory or 0) // MIB),
        job.user,
        "" if job.time_limit is None else f"{job.time_limit:g}",
        "" if job.utilization is None else job.utilization / 100,
        job.command or "",
    )


def table_text(
    pages: Jobs, now: datetime, screen: Screen, most: int | None = None
) -> Iterator[str]:
    """Yield the text of a table of past jobs, page by page.

    With `most`, at most that number, and a line that says how to see older ones.
    """
    first = next(pages)
    if not first:
        yield drawn([NONE], screen)
        return
    tables = (table(jobs[:most], now) for jobs in chain([first], pages))
    for piece in draw_in_pages(tables, screen.width, colour=screen.colour):
        yield shown(piece, screen)
    if most is not None and len(first) > most:
        yield drawn([older(most)], screen)


NONE = line("no job has ended", "dim")


def older(shown: int) -> Line:
    """Say how to see more than the jobs shown."""
    return line(f"the latest {shown} jobs; --limit N or --since SPAN shows older ones", "dim")


def table(jobs: Sequence[PastJobView], now: datetime) -> Table:
    """Lay out past jobs."""
    columns = (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=1, shrinks=True, below=""),
        Column("ASKS", right=True, leaves=2, below="asks "),
        Column("USED", right=True, leaves=4, below="used "),
        Column("UTIL", right=True, leaves=6),
        Column("SUBMITTED", right=True, leaves=5),
        Column("WAITED", right=True, leaves=3, below="waited "),
        Column("RAN", right=True),
        Column("END", wraps=True, least=10),
        Column("EXIT", right=True),
    )
    return Table(columns, tuple([_row(job, now) for job in jobs]))


def _row(job: PastJobView, now: datetime) -> tuple[Line, ...]:
    failed = has_failed(job)
    asks = size(job.memory)
    ended = instant(job.ended_at)
    granted = None if job.granted_at is None else instant(job.granted_at)
    return (
        line(clean(job.label)),
        line(clean(job.user)),
        line(named(job)),
        line(f"{job.gpus} x {asks}" if job.gpus > 1 else asks),
        line("" if granted is None else amount(job.used)),
        line("" if granted is None else percent(job.utilization)),
        line(clock(job.submitted_at, now)),
        line(format_span((granted or ended) - instant(job.submitted_at))),
        line("" if granted is None else format_span(ended - granted)),
        line(ending(job), "bad" if failed else "dim"),
        line("" if job.exit_status is None else str(job.exit_status), "bad" if failed else ""),
    )
