"""`gpulease cancel` on a cluster: scancel."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache

from gpulease.cli.caller import refuse_unknown_user
from gpulease.cli.job_selection import Selection, for_each, no_match
from gpulease.cli.render import print_stdout
from gpulease.errors import BadUsage, SlurmFailed
from gpulease.slurm.command.jobs import elements, read_queue, state_of, uses_gpus
from gpulease.slurm.command.refusals import refusal
from gpulease.slurm.command.selection import Row, announce, by_array, is_array, select
from gpulease.slurm.commands import run_slurm

_MOST_ONE_BY_ONE = 20
"""Jobs for which the result is printed one by one."""
_DEADLINE_S = 120.0
"""For one scancel of any number of jobs."""
_KILL_WAIT = re.compile(r"^KillWait\s*= (\d+ sec)$", re.MULTILINE)


def cancel_jobs(wanted: Selection, user: str | None, grace: str | None) -> int:
    """Cancel jobs, print what becomes of each, and return the exit code."""
    if grace is not None:
        raise BadUsage(
            "cannot use --grace on a cluster: Slurm has one grace for all jobs, KillWait",
            "leave out --grace",
        )
    found = select(wanted) if user is None else _of_user(wanted, user)
    if len(found) <= _MOST_ONE_BY_ONE:
        return for_each(found, lambda job: _cancel(job, found[job]))
    live = [row for rows in found.values() for row in rows if state_of(row) != "ended"]
    run_slurm(["scancel", *found], os.environ, _DEADLINE_S)
    print_stdout(_summary(live))
    return 0


def _of_user(wanted: Selection, user: str) -> dict[str, list[Row]]:
    """Return the live jobs of a user that use GPUs, all or those that match --name."""
    hint = "gpulease list --all shows the jobs of all users"
    refuse_unknown_user(user, "cancel jobs of", hint)
    pattern = wanted.pattern or "*"
    found = by_array(
        [
            row
            for row in read_queue(user=user)
            if uses_gpus(row) and fnmatchcase(row.get("name", ""), pattern)
        ]
    )
    if not found and wanted.pattern is not None:
        raise no_match(wanted, user)
    announce("cancel", found, user)
    return found


def _cancel(job: str, rows: Sequence[Row]) -> str:
    live = [row for row in rows if state_of(row) != "ended"]
    what = f"array {job}" if is_array(job, rows) else f"job {job}"
    if not live:
        return f"{what} had already ended"
    try:
        run_slurm(["scancel", job])
    except SlurmFailed as error:
        raise refusal(error, "cancel", job, rows[0]) from None
    if is_array(job, rows):
        return f"{what}: {_summary(live)}"
    if state_of(live[0]) == "queued":
        return f"{what} is cancelled"
    return f"{what} is ending; Slurm kills processes that remain after {_grace()}"


@cache
def _grace() -> str:
    """Return the time between SIGTERM and SIGKILL, as Slurm writes it: 30 sec."""
    with suppress(SlurmFailed):
        if found := _KILL_WAIT.search(run_slurm(["scontrol", "show", "config"])):
            return found[1]
    return "its grace"


def _summary(live: Sequence[Row]) -> str:
    """Describe many jobs that were cancelled together."""
    waiting = sum(elements(row) for row in live if state_of(row) == "queued")
    ending = sum(state_of(row) != "queued" for row in live)
    parts = []
    if waiting:
        parts.append("1 job is cancelled" if waiting == 1 else f"{waiting} jobs are cancelled")
    if ending:
        parts.append("1 job is ending" if ending == 1 else f"{ending} jobs are ending")
    return "; ".join(parts)
