"""`gpulease extend` on a cluster: the time limits of jobs of Slurm."""

import math
from datetime import timedelta

from gpulease.cli.job_selection import Selection, for_each
from gpulease.cli.render import local_time
from gpulease.drawing.words import clock, until
from gpulease.errors import GpuleaseError, NotAllowed, SlurmFailed, WrongState
from gpulease.slurm.command.jobs import read_queue, state_of, view
from gpulease.slurm.command.refusals import refusal
from gpulease.slurm.command.selection import Row, select
from gpulease.slurm.commands import run_slurm
from gpulease.units import format_span

_MINUTE_S = 60


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
        raise _refused(error, job, row, change) from None
    changed = view(read_queue(jobs=[job])[0], 0)
    now = local_time()
    if (end := changed.expires_at) is not None:
        return f"job {job} now ends at {clock(end, now)}, in {until(end, now)}"
    limit = timedelta(seconds=changed.claim.time_limit or 0)
    return f"job {job} may run for {format_span(limit)} once it starts"


def _refused(error: SlurmFailed, job: str, row: Row, change: str) -> GpuleaseError:
    if "ermission denied" in error.message and change.startswith("+"):
        return NotAllowed(
            f"cannot extend job {job}: Slurm lets only its admins raise the limit of a job",
            f"ask one for: scontrol update jobid={job} timelimit={change}",
        )
    return refusal(error, "extend", job, row)
