"""The pages of `gpulease list` and `gpulease history`: jobs, one on a line."""

from __future__ import annotations

import sys
from itertools import chain

from gpulease.cli.job_table import page, past_page
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import (
    drawn,
    local_time,
    print_paged,
    print_stdout,
    stdout_screen,
    write_stdout,
)
from gpulease.client.light_client import read
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import (
    SUSPENDED,
    alike,
    instant,
)
from gpulease.errors import BadUsage, BadValue, NoDaemon
from gpulease.light_json import encode, indent
from gpulease.units import MIB, parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from gpulease.client.light_client import LightClient
    from gpulease.wire.jobs import JobList, JobView
    from gpulease.wire.usage import PastJobView

    Jobs = Iterator[Sequence[Any]]
    """Jobs, in pages."""

_LIVE = frozenset({"queued", "granted", "active", "releasing"})
_ON_A_SCREEN = 100
"""Rows that a terminal shows: more than fit on a screen, and few enough to print at once."""
_MORE = (1000, 10_000)
"""Jobs that are read where fewer share too few rows, as elements of an array do."""
_FEW = 50
"""Past jobs that are shown unless the line says how many."""
_MOST_LISTED = 10_000
"""What the daemon lists at most in one reply."""
_MOST_PAST = 1000
"""The same of past jobs."""
_MANY = 10**9
_EXAMPLE = "gpulease {} --{} 50"
TRACE = (
    "job", "submit_s", "duration_s", "gpus", "memory_mib", "user", "time_limit_s", "utilization",
    "command",
)  # fmt: skip
"""The columns of a trace."""


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

    `limit` is a number or "all"; None: all, but on a terminal the first hundred rows. `last` is a
    number of jobs, `since` a span in which they ended; both include ended jobs.
    """
    most = most_listed(limit, last, json=json)
    rows = most if limit is None and last is None else None
    seconds = None if since is None else parse_span(since).total_seconds()
    everything = everything or last is not None or since is not None
    if acts_on_slurm(socket):
        from gpulease.slurm.command import list_page

        list_page.print_list(
            everything=everything, user=user, state=state, most=most, since=seconds, name=name,
            json=json,
        )  # fmt: skip
        return
    # Only /proc tells which jobs are suspended: the daemon has them as active ones.
    at = "active" if state == SUSPENDED else state
    # --state lost includes ended jobs without --all.
    ended = everything or (at is not None and at not in _LIVE)
    client = light_client(socket)
    asked = {"everything": ended, "user": user, "state": _outcome(at), "name": name,
             "since": seconds, "brief": not json}  # fmt: skip
    if at != state:
        listed = read(client.jobs_json(**asked))
        suspended = [job for job in listed.jobs if job.suspended]
        listed.jobs, listed.total = suspended[-most:] if most else suspended, len(suspended)
    elif ended and limit == "all":
        listed = _everything(client, asked)
    elif most is not None:
        listed = _first(client, asked, most, rows, newest=ended)
    else:
        reply = client.jobs_json(**asked)
        if json:
            print_stdout(indent(reply))
            return
        listed = read(reply)
    if json:
        print_stdout(indent(encode(listed)))
        return
    if not listed.jobs:
        _refuse_unknown(user, "gpulease list --all shows the jobs of all users")
    laid_out = page(
        listed, local_time(), newest=ended, is_last=last is not None, rows=rows,
        is_part=(user, state, name, since) != (None, None, None, None),
    )  # fmt: skip
    print_paged(drawn(laid_out, stdout_screen()))


def _outcome(state: str | None) -> str | None:
    """Return a state or an end as the daemon spells it."""
    return None if state is None else state.replace("-", "_")


def _number(job: JobView) -> int:
    return job.id


def _first(
    client: LightClient, asked: dict[str, Any], most: int, rows: int | None, *, newest: bool
) -> JobList:
    """Return the first jobs of a listing, or the newest: `most`, or what fills `rows` if given."""
    # Each time from the first: what elements of an array wait for may change between two replies,
    # and they would no longer share a row.
    for many in (most, *(_MORE if rows else ())):
        listed: JobList = read(client.jobs_json(**asked, newest=newest, limit=many))
        if listed.next is None or len(alike(listed.jobs)) >= most:
            break
    listed.jobs.sort(key=_number)
    return listed


def _everything(client: LightClient, asked: dict[str, Any]) -> JobList:
    """Return all jobs, from as many replies as needed."""
    listed: JobList = read(client.jobs_json(**asked, newest=True, limit=_MOST_LISTED))
    following = listed.next
    while following is not None:
        older: JobList = read(
            client.jobs_json(**asked, newest=True, after=following, limit=_MOST_LISTED)
        )
        listed.jobs += older.jobs
        following = older.next
    listed.jobs.sort(key=_number)
    listed.total, listed.next = len(listed.jobs), None
    return listed


def _refuse_unknown(user: str | None, hint: str) -> None:
    if user is not None:
        from gpulease.cli.caller import refuse_unknown_user

        refuse_unknown_user(user, "list jobs of", hint)


def most_listed(limit: str | None, last: str | None = None, *, json: bool) -> int | None:
    """Return how many jobs to list; None: all.

    Raises:
        BadUsage: `limit` is neither a number above zero nor "all", or `last` is no such number.
    """
    if limit is not None and last is not None:
        raise BadUsage(
            "cannot list jobs: --limit and --last exclude each other",
            _EXAMPLE.format("list", "limit"),
        )
    if last is not None:
        return _number_of_jobs(last, "last")
    if limit is None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        return _ON_A_SCREEN if is_terminal and not json else None
    return _limit(limit, "list", _MOST_LISTED)


def _limit(limit: str | None, verb: str, most: int) -> int | None:
    return None if limit in (None, "all") else _number_of_jobs(str(limit), "limit", verb, most)


def _number_of_jobs(text: str, option: str, verb: str = "list", most: int = _MOST_LISTED) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not is_number or not 0 < int(text) <= most:
        raise BadUsage(
            f"cannot use --{option} {text[:40]!r}: write a number from 1 to {most}"
            + (", or all" if option == "limit" else ""),
            _EXAMPLE.format(verb, option),
        )
    return int(text)


def print_history(
    *,
    user: str | None,
    since: str | None,
    state: str | None,
    name: str | None,
    limit: str | None,
    as_csv: bool,
    json: bool,
    socket: Path | str | None,
) -> None:
    """Print the latest past jobs that the filters leave; `limit` None: see `_FEW`."""
    if as_csv and json:
        raise BadValue("cannot list jobs: --csv and --json exclude each other", "use one of them")
    is_cut = limit is None and since is None and not as_csv
    most = _FEW if is_cut else _limit(limit, "history", _MANY)
    seconds = None if since is None else parse_span(since).total_seconds()
    asked = {
        "user": user,
        "since": seconds,
        "outcome": None if state == "ended" else _outcome(state),
        "name": name,
    }
    try:
        client = light_client(socket, "history")
    except NoDaemon:
        if not acts_on_slurm(socket):
            raise
        from gpulease.slurm.command.list_page import print_ended

        most = _MOST_PAST if most is None else most
        print_ended(user, seconds, state, name, most, as_csv=as_csv, json=json)
        return
    # One more than the limit says whether others follow.
    more = most + 1 if most is not None and (json or is_cut) else most
    pages = _pages(client, asked, more)
    if as_csv:
        print_stdout(",".join(TRACE))
        for jobs in pages:
            write_stdout(trace_of(jobs))
        return
    found = list(chain.from_iterable(pages))
    shown = found[:most]
    if json:
        view = {"jobs": shown, "before": shown[-1].id if len(found) > len(shown) else None}
        print_stdout(indent(encode(view)))
        return
    if not found:
        _refuse_unknown(user, "gpulease history shows the jobs of all users")
    cut = len(found) > len(shown) and is_cut
    is_part = any(each is not None for each in asked.values())
    laid_out = past_page(shown, local_time(), is_cut=cut, is_part=is_part)
    print_paged(drawn(laid_out, stdout_screen()))


def _pages(client: LightClient, asked: dict[str, Any], limit: int | None) -> Jobs:
    """Yield pages of at most `limit` jobs in all; the first one may be empty."""
    before: int | None = None
    while limit is None or limit > 0:
        most = _MOST_PAST if limit is None else min(limit, _MOST_PAST)
        view = read(client.history_json(**asked, before=before, limit=most))
        yield view.jobs
        if view.before is None:
            return
        before = view.before
        limit = None if limit is None else limit - len(view.jobs)


def trace_of(jobs: Sequence[PastJobView]) -> str:
    """Return the jobs that held memory as lines of a trace."""
    import csv
    import io

    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for job in jobs:
        if not job.granted_at or job.memory is None:
            continue
        ran_for = instant(job.ended_at).timestamp() - instant(job.granted_at).timestamp()
        writer.writerow(
            (
                job.label,
                instant(job.submitted_at).timestamp(),
                # The clock of the machine may have been set.
                max(0, round(ran_for, 3)),
                job.gpus,
                # Rounded up: a job needs what it leased.
                -(-job.memory // MIB),
                job.user,
                "" if job.time_limit is None else f"{job.time_limit:g}",
                "" if job.utilization is None else job.utilization / 100,
                job.command or "",
            )
        )
    return lines.getvalue()
