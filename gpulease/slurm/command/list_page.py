"""`gpulease list` on a cluster: the jobs of Slurm that use GPUs, one on a line."""

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import get_args

from gpulease.cli.caller import refuse_unknown_user
from gpulease.cli.pager import print_paged
from gpulease.cli.render import drawn, local_time, print_stderr, print_stdout, screen_of
from gpulease.cli.tables import Column, Line, Page, Style, Table, line
from gpulease.drawing.words import (
    SUSPENDED,
    UNKNOWN,
    between,
    clean,
    clock,
    instant,
    sentence,
    size,
)
from gpulease.errors import BadUsage
from gpulease.light_json import encode, indent
from gpulease.locations import environment
from gpulease.slurm.command.jobs import order_of, read_queue, uses_gpus, view
from gpulease.slurm.command.nodes import shard_and_used
from gpulease.slurm.command.views import JobList, JobView
from gpulease.wire.jobs import JobState
from gpulease.wire.text import has_failed, spoken

_ENDS = frozenset({"exited", "signaled", "cancelled", "time-limit", "over-lease", "idle", "lost",
                   "preempted", "launch-failed", "gave-up", "failed"})  # fmt: skip
"""What Slurm and the daemons of nodes record about ends."""
_STYLES: dict[str, Style] = {"active": "good", "ended": "dim"}
_FAR = timedelta(days=300)
"""Jobs without a time limit count as a year long in the predictions of Slurm."""


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
    _refuse_unknown(state)
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
    print_paged([drawn(page(listed, now, newest=ended), screen_of(sys.stdout, environment()))])


def print_ended(
    user: str | None,
    since: float | None,
    state: str | None,
    name: str | None,
    most: int,
    *,
    json: bool,
) -> None:
    """Print the ended jobs that Slurm still knows, the newest first, where no daemon knows more."""
    print_stderr(
        "gpulease: jobs that Slurm still knows, by MinJobAge; sacct lists older ones, and "
        "gpulease history on a node those that ran there"
    )
    print_list(
        everything=True, user=user, state=state or "ended", most=most, since=since, name=name,
        json=json, newest_first=True,
    )  # fmt: skip


def _refuse_unknown(state: str | None) -> None:
    if state is not None and state not in {*get_args(JobState), SUSPENDED, *_ENDS}:
        raise BadUsage(
            f"cannot list jobs by --state {state}: Slurm does not record such ends",
            f"on a cluster, STATE is {', '.join([*get_args(JobState), SUSPENDED, *sorted(_ENDS)])}",
        )


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


def table(jobs: Sequence[JobView], now: datetime) -> Table:
    """Lay out jobs, one on a line."""
    waiting = any(expected(job, now) != UNKNOWN for job in jobs)
    codes = any(code_of(job) for job in jobs)
    used = any(job.used is not None for job in jobs)
    columns = (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=1, shrinks=True, cuts="middle", least=40, below=""),
        Column("STATE"),
        Column("ASKS", right=True, leaves=3, below="asks "),
        *((Column("USED", right=True, leaves=3, below="used "),) if used else ()),
        Column("NODE", leaves=2, wraps=True, below="on "),
        Column("SUBMITTED", right=True, leaves=5),
        *((Column("STARTS", right=True, leaves=4, below="starts "),) if waiting else ()),
        Column("RAN", right=True, leaves=4, below="ran "),
        *((Column("EXIT", right=True),) if codes else ()),
    )
    rows = (_row(job, now, waiting=waiting, codes=codes, used=used) for job in jobs)
    return Table(columns, tuple(rows))


def _row(
    job: JobView, now: datetime, *, waiting: bool, codes: bool, used: bool
) -> tuple[Line, ...]:
    failed = has_failed(job)
    style: Style = "warn" if job.suspended else _STYLES.get(job.state, "warn")
    return (
        line(job.label),
        line(clean(job.user)),
        line(clean(job.name)),
        line(outcome_of(job), "bad" if failed else style),
        line(requested(job)),
        *((line("" if job.used is None else size(job.used)),) if used else ()),
        line(nodes_of(job)),
        line(clock(job.submitted_at, now)),
        *((line(expected(job, now) if job.state == "queued" else ""),) if waiting else ()),
        line(between(job.started_at, job.ended_at, now) if job.started_at else ""),
        *((line(code_of(job), "bad" if failed else ""),) if codes else ()),
    )


def requested(job: JobView) -> str:
    """Write what a job asked for: 4G, or 2 GPUs."""
    claim = job.claim
    if claim.exclusive:
        return "1 GPU" if claim.gpus == 1 else f"{claim.gpus} GPUs"
    return size(claim.memory)


def outcome_of(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    if job.suspended:
        return SUSPENDED
    return spoken(job.outcome or job.state)


def nodes_of(job: JobView) -> str:
    """Write the nodes of a job."""
    return clean(job.nodes or ("" if job.state in ("queued", "ended") else UNKNOWN))


def gpus_of(job: JobView) -> str:
    """Write the indexes of the GPUs of a job, with the node where there are several."""
    if len(job.leases) == 1:
        return job.leases[0].gpu or UNKNOWN
    known = [f"{clean(lease.node)}:{lease.gpu}" for lease in job.leases if lease.gpu]
    return " ".join(known) or UNKNOWN


def code_of(job: JobView) -> str:
    """Write the exit code, where the state does not tell how the job ended."""
    has_code = job.outcome in ("exited", "signaled") and job.exit_status is not None
    return str(job.exit_status) if has_code else ""


def place_of(job: JobView) -> int:
    """Return how many places in the queue a job takes."""
    return 1 if job.array_waiting is None else job.array_waiting.jobs


def expected(job: JobView, now: datetime) -> str:
    """Write when Slurm expects a job to start."""
    at = job.expected_start_at
    return UNKNOWN if at is None or instant(at) - now > _FAR else clock(at, now)


def reason_of(job: JobView, now: datetime) -> str | None:
    """Write why a job waits or ended."""
    begins = f"not before {clock(job.begin_at, now)}" if job.begin_at else None
    parts = [begins, sentence(job.reason) if job.reason else None]
    return "; ".join(filter(None, parts)) or None
