"""The page of `gpulease list`: jobs, one on a line."""

from __future__ import annotations

import sys

from gpulease.cli.light_connection import light_client
from gpulease.cli.pager import print_paged
from gpulease.cli.render import drawn, local_time, print_stdout, screen_of
from gpulease.cli.tables import Column, Line, Page, Style, Table, line
from gpulease.client.light_client import read
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import (
    SUSPENDED,
    alike,
    between,
    clean,
    clock,
    ids_of,
    label,
    named,
    requested,
)
from gpulease.errors import BadUsage
from gpulease.light_json import encode, indent
from gpulease.locations import environment
from gpulease.units import parse_span
from gpulease.wire.text import has_failed, shown_command, spoken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path
    from typing import Any

    from gpulease.client.light_client import LightClient
    from gpulease.wire.jobs import JobList, JobView

_STYLES: dict[str, Style] = {"active": "good", "ended": "dim"}
_STATES = frozenset({"queued", "granted", "active", "releasing", "ended"})
_STATE_OF = {SUSPENDED: "active"}
"""What to ask the daemon for: suspended jobs are active ones to it."""
_ON_A_SCREEN = 100
"""Jobs that a terminal shows: more than fit on a screen, and few enough to print at once."""
_MOST_LISTED = 10_000
"""What the daemon lists at most in one reply."""
_MOST_DIGITS = 9
_LONG_NAME = 40
"""Longer names are shortened where a listing would be too wide."""
_STARTS, _EXIT = "STARTS", "EXIT"
_EXAMPLE = "gpulease list --{} 50"
_HAVE_CODE = frozenset({"exited", "signaled"})
"""The ends of which an exit code tells more."""


def print_list(
    *,
    everything: bool,
    user: str | None,
    state: str | None,
    limit: str | None,
    json: bool,
    socket: Path | str | None,
    last: str | None = None,
    since: str | None = None,
    name: str | None = None,
) -> None:
    """Print the jobs that wait or run, with `everything` also ended ones; or those in a state.

    `limit` is a number or "all"; None: all, but on a terminal the first hundred or so. `last` is a
    number of jobs, `since` a span in which they ended; both include ended jobs.
    """
    most = most_listed(limit, last, json=json)
    seconds = None if since is None else parse_span(since).total_seconds()
    everything = everything or last is not None or since is not None
    if acts_on_slurm(socket):
        from gpulease.slurm.command import list_page

        list_page.print_list(
            everything=everything, user=user, state=state, most=most, since=seconds, name=name,
            json=json,
        )  # fmt: skip
        return
    # --state lost includes ended jobs without --all.
    at = state if state is None or state in _STATES else _STATE_OF.get(state, "ended")
    ended = everything or at == "ended"
    client = light_client(socket)
    asked: dict[str, Any] = {
        "everything": ended, "user": user, "state": at, "name": name, "since": seconds,
    }  # fmt: skip
    if at != state or (ended and limit == "all"):
        listed = _from_pages(client, asked, state if at != state else None, most)
    elif most is not None:
        listed = _first(client, asked, most, newest=ended)
    else:
        reply = client.jobs_json(**asked)
        if json:
            print_stdout(indent(reply))
            return
        listed = read(reply)
    if json:
        print_stdout(indent(encode(listed)))
        return
    if user is not None and not listed.jobs:
        from gpulease.cli.caller import refuse_unknown_user

        hint = "gpulease list --all shows the jobs of all users"
        refuse_unknown_user(user, "list jobs of", hint)
    shown = page(listed, local_time(), newest=ended, is_last=last is not None)
    print_paged([drawn(shown, screen_of(sys.stdout, environment()))])


def most_listed(limit: str | None, last: str | None = None, *, json: bool) -> int | None:
    """Return how many jobs to list; None: all.

    Raises:
        BadUsage: `limit` is neither a number above zero nor "all", or `last` is no such number.
    """
    if limit is not None and last is not None:
        raise BadUsage(
            "cannot list jobs: --limit and --last exclude each other", _EXAMPLE.format("limit")
        )
    if last is not None:
        return _number_of_jobs(last, "last")
    if limit is None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        return _ON_A_SCREEN if is_terminal and not json else None
    if limit == "all":
        return None
    return _number_of_jobs(limit, "limit")


def _number_of_jobs(text: str, option: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not is_number or not 0 < int(text) <= _MOST_LISTED:
        raise BadUsage(
            f"cannot list {text[:40]!r} jobs: write a number from 1 to {_MOST_LISTED}"
            + (", or all" if option == "limit" else ""),
            _EXAMPLE.format(option),
        )
    return int(text)


def _first(client: LightClient, asked: dict[str, Any], most: int, *, newest: bool) -> JobList:
    """Return at most `most` jobs: the latest with ended jobs, the first without."""
    listed: JobList = read(client.jobs_json(**asked, newest=newest, limit=most))
    listed.jobs.sort(key=_number)
    if len(listed.jobs) > most:  # a daemon of an earlier version lists all
        listed.total = len(listed.jobs)
        listed.jobs = listed.jobs[-most:] if newest else listed.jobs[:most]
        listed.next = listed.jobs[0 if newest else -1].id
    return listed


def _from_pages(
    client: LightClient, asked: dict[str, Any], wanted: str | None, most: int | None
) -> JobList:
    """Return the latest jobs, or those that ended in the `wanted` way, from as few pages as needed.

    If older pages are left, `total` is None.
    """
    found: list[JobView] = []
    after: int | None = None
    while True:
        listed: JobList = read(
            client.jobs_json(**asked, newest=True, after=after, limit=_MOST_LISTED)
        )
        page_found = [job for job in listed.jobs if wanted is None or _matches(job, wanted)]
        # A daemon of an earlier version lists all at once, oldest first.
        found = sorted(page_found, key=_number) + found
        after = listed.next
        if after is None or (most is not None and len(found) >= most):
            break
    listed.total = len(found) if after is None else None
    listed.jobs = found[-most:] if most else found
    has_more = after is not None or len(found) > len(listed.jobs)
    listed.next = listed.jobs[0].id if has_more else None
    return listed


def _number(job: JobView) -> int:
    return job.id


def _matches(job: JobView, wanted: str) -> bool:
    if wanted == SUSPENDED:
        return bool(job.suspended)
    if wanted == "failed":
        return has_failed(job)
    return bool(spoken(job.outcome or "") == wanted)


def page(listed: JobList, now: datetime, *, newest: bool = False, is_last: bool = False) -> Page:
    """Lay out a listing, which may have the first jobs only, or the `newest`.

    With `is_last`, the user asked for this number of jobs.
    """
    if not listed.jobs:
        return [line("no jobs", "dim")]
    columns = _columns(
        # Only where a job waits: most listings are of jobs that run or have ended.
        waiting=any(job.expected_start_at for job in listed.jobs),
        codes=any(_code(job) for job in listed.jobs),
    )
    more = (listed.total or 0) - len(listed.jobs)
    is_all = more <= 0 and (listed.total is not None or listed.next is None)
    last = None if is_all else listed.jobs[0 if newest else -1]
    rows = tuple(_row(group, _ids(group, last), now, columns) for group in alike(listed.jobs))
    if is_all:
        return [Table(columns, rows)]
    count = f"{more} {'older' if newest else 'more'}" if more > 0 else "there may be older ones"
    text = count if is_last else f"{count}; --limit all lists them"
    return [Table(columns, rows), line(text, "dim")]


def _columns(*, waiting: bool, codes: bool) -> tuple[Column, ...]:
    return (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=1, shrinks=True, cuts="middle", least=_LONG_NAME, below=""),
        Column("STATE"),
        Column("ASKS", right=True, leaves=3, below="asks "),
        Column("SUBMITTED", right=True, leaves=5),
        *((Column(_STARTS, right=True, leaves=4, below="starts "),) if waiting else ()),
        Column("RAN", right=True, leaves=4, below="ran "),
        *((Column(_EXIT, right=True),) if codes else ()),
        Column("COMMAND", leaves=6, shrinks=True, least=16, narrows_first=True),
    )


def _style(job: JobView) -> Style:
    return "warn" if job.suspended else _STYLES.get(job.state, "warn")


def _ids(group: Sequence[JobView], last: JobView | None) -> str:
    """Return the ids of a row; with `last`, the job where the listing was cut, it may have more."""
    ids = ids_of(group)
    if last is None or len(group) == 1 or all(job is not last for job in group):
        return ids
    if last is group[0]:
        return ids.replace("[", "[...,")
    return ids if ids.endswith("...]") else ids.replace("]", ",...]")


def _row(
    group: Sequence[JobView], ids: str, now: datetime, columns: Sequence[Column]
) -> tuple[Line, ...]:
    job, titles = group[0], [column.title for column in columns]
    failed = has_failed(job)
    return (
        line(ids),
        line(clean(job.user)),
        line(named(job)),
        line(label(job), "bad" if failed else _style(job)),
        line(requested(job)),
        line(clock(job.submitted_at, now)),
        *((line(_expected(job, now)),) if _STARTS in titles else ()),
        line(between(job.started_at, job.ended_at, now) if job.started_at else ""),
        *((line(_code(job), "bad" if failed else ""),) if _EXIT in titles else ()),
        line(shown_command(job.command)),
    )


def _expected(job: JobView, now: datetime) -> str:
    return clock(job.expected_start_at, now) if job.state == "queued" else ""


def _code(job: JobView) -> str:
    """Write the exit code, where the state does not tell how the job ended."""
    return str(job.exit_status) if job.outcome in _HAVE_CODE and job.exit_status is not None else ""
