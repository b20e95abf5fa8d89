"""`gpulease cancel` and `gpulease extend` on a cluster: scancel, and scontrol update."""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase

from gpulease.cli.caller import refuse_unknown_user
from gpulease.cli.job_selection import Selection, announce, for_each, no_match
from gpulease.cli.render import local_time, print_stdout
from gpulease.drawing.words import clean, clock, until
from gpulease.errors import BadUsage, GpuleaseError, NotAllowed, SlurmFailed, WrongState
from gpulease.slurm.command.jobs import elements, read_queue, state_of, uses_gpus, view
from gpulease.slurm.command.selection import Row, by_array, is_array, named, select
from gpulease.slurm.commands import run_slurm
from gpulease.units import format_span

_MOST_ONE_BY_ONE = 20
"""Jobs for which the result is printed one by one."""
_DEADLINE_S = 120.0
"""For one scancel of any number of jobs."""
_MINUTE_S = 60
_DENIED = ("ermission denied", "nvalid user id", "not allowed")
_OVER = ("already finished", "already completing", "nvalid job id")


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
    run_slurm(["scancel", *found], _DEADLINE_S)
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
    announce("cancel", named(found), len(found), user)
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
    return f"{what} is ending; Slurm kills processes that remain after KillWait"


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


def extend_jobs(wanted: Selection, seconds: float) -> int:
    """Add time to the limits of jobs (below zero: remove), and return the exit code.

    Slurm counts in minutes.
    """
    minutes = math.ceil(abs(seconds) / _MINUTE_S)
    change = f"{'-' if seconds < 0 else '+'}{minutes}"
    found = select(wanted)
    if wanted.every:
        found = {job: rows for job, rows in found.items() if _limit(rows[0]) is not None}
    return for_each(found, lambda job: _extend(job, found[job][0], change))


def _limit(row: Row) -> float | None:
    return view(row, 0).claim.time_limit


def _extend(job: str, row: Row, change: str) -> str:
    if state_of(row) == "ended":
        raise WrongState(f"cannot extend job {job}: it has ended")
    if _limit(row) is None:
        raise WrongState(f"cannot extend job {job}: it has no time limit")
    try:
        run_slurm(["scontrol", "update", f"jobid={job}", f"timelimit={change}"])
    except SlurmFailed as error:
        if "ermission denied" in error.message and change.startswith("+"):
            raise NotAllowed(
                f"cannot extend job {job}: Slurm lets only its admins raise the limit of a job",
                f"ask one for: scontrol update jobid={job} timelimit={change}",
            ) from None
        raise refusal(error, "extend", job, row) from None
    changed = view(read_queue(jobs=[job])[0], 0)
    now = local_time()
    if (end := changed.expires_at) is not None:
        return f"job {job} now ends at {clock(end, now)}, in {until(end, now)}"
    limit = timedelta(seconds=changed.claim.time_limit or 0)
    return f"job {job} may run for {format_span(limit)} once it starts"


def refusal(error: SlurmFailed, doing: str, job: str, row: Mapping[str, str]) -> GpuleaseError:
    """Return the error for a job on which a command of Slurm failed; `doing` follows "cannot"."""
    if any(each in error.message for each in _DENIED):
        owner = clean(row.get("username", "another user"))
        return NotAllowed(
            f"cannot {doing} job {job}: it belongs to {owner}",
            "only its owner and the admins of Slurm may",
        )
    if any(each in error.message for each in _OVER):
        return WrongState(f"cannot {doing} job {job}: it has ended")
    return SlurmFailed(f"cannot {doing} job {job}: {clean(error.message)}", error.hint)
