"""`gpulease list` on a cluster: the jobs of Slurm that use GPUs, one on a line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import get_args

from gpulease.cli.caller import refuse_unknown_user
from gpulease.cli.job_table import LISTED, OF_ALL, exit_code, job_table
from gpulease.cli.render import (
    drawn,
    local_time,
    print_paged,
    print_stderr,
    print_stdout,
    stdout_screen,
)
from gpulease.cli.tables import Page, Style, Table, line
from gpulease.drawing.words import (
    SUSPENDED,
    UNKNOWN,
    clean,
    instant,
    size,
)
from gpulease.errors import BadUsage, BadValue
from gpulease.light_json import encode, indent
from gpulease.slurm.command.jobs import order_of, read_queue, uses_gpus, view
from gpulease.slurm.command.views import (
    JobList,
    JobView,
    expected,
    nodes_of,
    outcome_of,
    requested,
    shard_and_used,
)
from gpulease.wire.jobs import JobState
from gpulease.wire.text import has_failed, spoken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.cli.job_table import Cells

_ENDS = frozenset({"exited", "signaled", "cancelled", "time-limit", "over-lease", "idle", "lost",
                   "preempted", "launch-failed", "gave-up", "failed"})  # fmt: skip
"""What Slurm and the daemons of nodes record about ends."""
_STYLES: dict[str, Style] = {"active": "good", "ended": "dim"}


def print_list(
    *,
    everything: bool,
    user: str | None,
    state: str | None,
    most: int | None,
    since: float | None,
    name: str | None,
    json: bool,
    newest_first: bool = False,
) -> None:
    """Print the jobs that wait or run, with `everything` also ended ones; or those in a state.

    At most so many; with `since`, without those that ended more seconds ago.
    """
    known = [*get_args(JobState), SUSPENDED, *sorted(_ENDS)]
    if state is not None and state not in known:
        raise BadUsage(
            f"cannot list jobs by --state {state}: Slurm does not record such ends",
            f"on a cluster, STATE is {', '.join(known)}",
        )
    ended = everything or state == "ended" or state in _ENDS
    now = local_time()
    begin = None if since is None else now - timedelta(seconds=since)
    found = _found(state, user, name, begin, ended=ended)
    if user is not None and not found:
        hint = "gpulease list --all shows the jobs of all users"
        refuse_unknown_user(user, "list jobs of", hint)
    shown = found if most is None else found[-most:] if ended else found[:most]
    listed = JobList(shown[::-1] if newest_first else shown, len(found))
    if json:
        print_stdout(indent(encode(listed)))
        return
    print_paged(drawn(page(listed, now, newest=ended), stdout_screen()))


def print_ended(
    user: str | None,
    since: float | None,
    state: str | None,
    name: str | None,
    most: int,
    *,
    as_csv: bool,
    json: bool,
) -> None:
    """Print the ended jobs that Slurm still knows, the newest first, where no daemon knows more."""
    if as_csv:
        raise BadValue(
            "cannot print a trace: no gpuleased runs on this machine, and Slurm keeps no record of "
            "memory",
            "gpulease history --csv on a node prints the jobs that ran there",
        )
    print_stderr(
        "gpulease: jobs that Slurm still knows, by MinJobAge; sacct lists older ones, and "
        "gpulease history on a node those that ran there"
    )
    print_list(
        everything=True, user=user, state=state or "ended", most=most, since=since, name=name,
        json=json, newest_first=True,
    )  # fmt: skip


def _found(
    state: str | None, user: str | None, name: str | None, begin: datetime | None, *, ended: bool
) -> list[JobView]:
    """Return the jobs that match, oldest first."""
    rows = [
        row
        for row in read_queue(ended=ended)
        if uses_gpus(row)
        and user in (None, row.get("username"))
        and (name is None or fnmatchcase(row.get("name", ""), name))
    ]
    shard, used = shard_and_used() if rows else (0, {})
    jobs = [view(row, shard, used=used) for row in rows]
    return sorted(
        (
            job
            for job in jobs
            if (state is None or _matches(job, state))
            and (begin is None or job.ended_at is None or instant(job.ended_at) >= begin)
        ),
        key=order_of,
    )


def _matches(job: JobView, state: str) -> bool:
    if state == SUSPENDED:
        return job.suspended
    if state == "failed":
        return has_failed(job)
    return state in (job.state, spoken(job.outcome or ""))


def page(listed: JobList, now: datetime, *, newest: bool = False) -> Page:
    """Lay out a listing, which may have the first jobs only, or the `newest`."""
    if not listed.jobs:
        return [line("no jobs", "dim")]
    more = listed.total - len(listed.jobs)
    text = f"{more} {'older' if newest else 'more'}; --limit all lists them"
    return [table(listed.jobs, now), *([line(text, "dim")] if more else [])]


_CELLS: Cells = {
    "USER": OF_ALL["USER"],
    "NAME": lambda job, _: line(clean(job.name)),
    "STATE": lambda job, _: line(
        outcome_of(job),
        "bad" if has_failed(job) else "warn" if job.suspended else _STYLES.get(job.state, "warn"),
    ),
    "ASKS": lambda job, _: line(requested(job)),
    "USED": lambda job, _: line("" if job.used is None else size(job.used)),
    "NODE": lambda job, _: line(nodes_of(job)),
    "SUBMITTED": OF_ALL["SUBMITTED"],
    "STARTS": lambda job, now: line(expected(job, now) if job.state == "queued" else ""),
    "RAN": LISTED["RAN"],
    "EXIT": OF_ALL["EXIT"],
}


def table(jobs: Sequence[JobView], now: datetime) -> Table:
    """Lay out jobs, one on a line; a column without any cell is left out."""
    empty = {
        "USED": all(job.used is None for job in jobs),
        "STARTS": all(expected(job, now) == UNKNOWN for job in jobs),
        "EXIT": not any(map(exit_code, jobs)),
    }
    cells = {title: cell for title, cell in _CELLS.items() if not empty.get(title)}
    return job_table([(job.label, job) for job in jobs], now, cells)
