"""Jobs in a table, one on a line: of `list` and `history`, here and on a cluster."""

from __future__ import annotations

from gpulease.cli.tables import Column, Line, Page, Style, Table, line
from gpulease.drawing.words import (
    UNKNOWN,
    alike,
    amount,
    between,
    clean,
    clock,
    ids_of,
    instant,
    label,
    named,
    percent,
    requested,
    size,
    starts_in,
)
from gpulease.units import format_span
from gpulease.wire.text import ending, has_failed, shown_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from typing import Any

    from gpulease.slurm.command import views as slurm_views
    from gpulease.wire.jobs import JobList, JobView
    from gpulease.wire.usage import PastJobView

    Cells = dict[str, Callable[[Any, datetime], Line]]
    """By column, what makes its cell from a job."""

_STYLES: dict[str, Style] = {"active": "good"}
_LONG_NAME = 40
"""Longer names are shortened where a listing would be too wide."""
_HAVE_CODE = frozenset({"exited", "signaled"})
"""The ends of which an exit code tells more."""


def page(
    listed: JobList,
    now: datetime,
    *,
    newest: bool = False,
    is_last: bool = False,
    is_part: bool = False,
    rows: int | None = None,
) -> Page:
    """Lay out a listing, which may have the first jobs only, or the `newest`.

    At most `rows` of it are shown. With `is_last`, the user asked for this number of jobs; with
    `is_part`, for certain jobs.
    """
    if not listed.jobs:
        such = "no such job" if is_part else "no job"
        live = f"{such} waits or runs; gpulease list --all shows ended ones as well"
        return [line(f"{such}s" if newest else live, "dim")]
    # Most listings are of jobs that run: a column without any cell is left out.
    empty = {
        "STARTS": not any(job.expected_start_at for job in listed.jobs),
        "EXIT": not any(map(exit_code, listed.jobs)),
    }
    cells = {title: cell for title, cell in LISTED.items() if not empty.get(title)}
    found = alike(listed.jobs)
    shown = found if rows is None else found[-rows:] if newest else found[:rows]
    more = (listed.total or len(listed.jobs)) - sum(map(len, shown))
    is_all = more <= 0 and (listed.total is not None or listed.next is None)
    last = None if is_all else listed.jobs[0 if newest else -1]
    groups = [(_ids(group, last), group[0]) for group in shown]
    table = job_table(groups, now, cells)
    if is_all:
        return [table]
    count = f"{more} {'older' if newest else 'more'}" if more > 0 else "there may be older ones"
    text = count if is_last else f"{count}; --limit all lists them"
    return [table, line(text, "dim")]


def _ids(group: Sequence[JobView], last: JobView | None) -> str:
    """Return the ids of a row; with `last`, the job where the listing was cut, it may have more."""
    ids = ids_of(group)
    if last is None or len(group) == 1 or all(job.id != last.id for job in group):
        return ids
    if last.id == group[0].id:
        return ids.replace("[", "[...,")
    return ids if ids.endswith("...]") else ids.replace("]", ",...]")


_COLUMNS = (
    Column("JOB", right=True),
    Column("USER", wraps=True),
    Column("NAME", leaves=1, shrinks=True, cuts="middle", least=_LONG_NAME, below=""),
    Column("STATE"),
    Column("ASKS", right=True, leaves=3, below="asks "),
    Column("USED", right=True, leaves=4, below="used "),
    Column("UTIL", right=True, leaves=6),
    Column("RAM", right=True, leaves=7),
    Column("NODE", leaves=2, wraps=True, below="on "),
    Column("SUBMITTED", right=True, leaves=5),
    Column("STARTS", right=True, leaves=4, below="starts "),
    Column("WAITED", right=True, leaves=3, below="waited "),
    Column("RAN", right=True, leaves=4, below="ran "),
    Column("EXIT", right=True),
    Column("COMMAND", leaves=6, shrinks=True, least=16, narrows_first=True),
)
"""Each list has some of them."""


def job_table(jobs: Sequence[tuple[str, Any]], now: datetime, cells: Cells) -> Table:
    """Lay out jobs, each with what stands for its id."""
    columns = tuple([each for each in _COLUMNS if each.title in cells or each.title == "JOB"])
    makers = [cells[each.title] for each in columns[1:]]
    rows = [(line(ids), *[make(job, now) for make in makers]) for ids, job in jobs]
    return Table(columns, tuple(rows))


def _state(job: JobView, now: datetime) -> Line:
    if job.state == "ended":
        return _end(job, now)
    return line(label(job), "warn" if job.suspended else _STYLES.get(job.state, "warn"))


def _end(job: JobView | PastJobView, _: datetime) -> Line:
    return line(ending(job), "bad" if has_failed(job) else "dim")


def exit_code(job: JobView | PastJobView | slurm_views.JobView) -> str:
    """Write the exit code, where the state does not tell how the job ended."""
    return str(job.exit_status) if job.outcome in _HAVE_CODE and job.exit_status is not None else ""


OF_ALL: Cells = {
    "USER": lambda job, _: line(clean(job.user)),
    "NAME": lambda job, _: line(named(job)),
    "SUBMITTED": lambda job, now: line(clock(job.submitted_at, now)),
    "EXIT": lambda job, _: line(exit_code(job), "bad" if has_failed(job) else ""),
}
LISTED: Cells = OF_ALL | {
    "STATE": _state,
    "ASKS": lambda job, _: line(requested(job)),
    "STARTS": lambda job, now: line(
        (starts_in(job, now) or UNKNOWN) if job.state == "queued" else ""
    ),
    "RAN": lambda job, now: line(
        between(job.started_at, job.ended_at, now) if job.started_at else ""
    ),
    "COMMAND": lambda job, _: line(shown_command(job.command)),
}
_PAST: Cells = OF_ALL | {
    "STATE": _end,
    "ASKS": lambda job, _: line((f"{job.gpus} x " if job.gpus > 1 else "") + size(job.memory)),
    "USED": lambda job, _: line(amount(job.used) if job.granted_at else ""),
    "UTIL": lambda job, _: line(percent(job.utilization) if job.granted_at else ""),
    "RAM": lambda job, _: line(amount(job.ram_peak) if job.granted_at else ""),
    "WAITED": lambda job, _: line(
        format_span(instant(job.granted_at or job.ended_at) - instant(job.submitted_at))
    ),
    "RAN": lambda job, _: line(
        format_span(instant(job.ended_at) - instant(job.granted_at)) if job.granted_at else ""
    ),
}


def past_page(
    jobs: Sequence[PastJobView], now: datetime, *, is_cut: bool = False, is_part: bool = False
) -> Page:
    """Lay out past jobs; with `is_cut`, say how to see older ones; `is_part` as of `page`."""
    if not jobs:
        return [line("no such job has ended" if is_part else "no job has ended", "dim")]
    has_ram = any(job.ram_peak is not None for job in jobs)
    cells = {title: cell for title, cell in _PAST.items() if title != "RAM" or has_ram}
    table = job_table([(clean(job.label), job) for job in jobs], now, cells)
    text = f"the latest {len(jobs)} jobs; --limit N or --since SPAN shows older ones"
    return [table, *([line(text, "dim")] if is_cut else ())]
