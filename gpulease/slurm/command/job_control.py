"""What commands do to jobs on a cluster, by Slurm's own commands.

`cancel` is scancel, `extend` scontrol update, and `attach` sattach. `wait` asks squeue until jobs
have ended.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from gpulease.cli.caller import refuse_unknown_user
from gpulease.cli.exit_codes import SIGNALED
from gpulease.cli.job_selection import MOST_ONE_BY_ONE, Selection, for_each
from gpulease.cli.render import local_time, print_stderr, print_stdout
from gpulease.drawing.words import cancelled, clean, clock, until
from gpulease.errors import (
    EXIT_GAVE_UP,
    EXIT_OWN_FAILURE,
    BadUsage,
    GpuleaseError,
    NotAllowed,
    SlurmFailed,
    WrongState,
)
from gpulease.slurm.command.jobs import elements, read_queue, state_of, view
from gpulease.slurm.command.selection import Row, is_array, is_of, labels, select
from gpulease.slurm.command.views import outcome_of
from gpulease.slurm.commands import become, run_slurm
from gpulease.slurm.records import is_batch
from gpulease.units import format_span

_DEADLINE_S = 120.0
"""For one scancel of any number of jobs."""
_MINUTE_S = 60
_DENIED = ("ermission denied", "nvalid user id", "not allowed")
_OVER = ("already finished", "already completing", "nvalid job id")
_FIRST_S, _LONGEST_S = 0.25, 5.0
"""Between two looks: each costs slurmctld a list of jobs."""
_SIGTERM = 15
_STATUS = {"cancelled": SIGNALED + _SIGTERM, "preempted": SIGNALED + _SIGTERM,
           "gave_up": EXIT_GAVE_UP}  # fmt: skip


def cancel_jobs(wanted: Selection, user: str | None, grace: str | None) -> int:
    """Cancel jobs, print what becomes of each, and return the exit code."""
    if grace is not None:
        raise BadUsage(
            "cannot use --grace on a cluster: Slurm has one grace for all jobs, KillWait",
            "leave out --grace",
        )
    if user is not None:
        hint = "gpulease list --all shows the jobs of all users"
        refuse_unknown_user(user, "cancel jobs of", hint)
    found = select(wanted, user)
    if len(found) <= MOST_ONE_BY_ONE:
        return for_each(found, lambda job: _cancel(job, found[job]))
    live = [row for rows in found.values() for row in rows if state_of(row) != "ended"]
    run_slurm(["scancel", *found], _DEADLINE_S)
    print_stdout(_summary(live))
    return 0


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
    return cancelled(waiting, ending=sum(state_of(row) != "queued" for row in live))


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


def worst_of(wanted: Selection, deadline: float | None, *, first: bool) -> int:
    """Return the highest exit code of jobs when all have ended; with `first`, that of one."""
    left, worst, pause, watch = select(wanted), 0, _FIRST_S, Watch()
    while True:
        for job in [job for job, rows in left.items() if has_ended(rows)]:
            worst = max(worst, *map(status_of, left.pop(job)))
            if first:
                return worst
        if not left:
            return worst
        remaining = pause if deadline is None else min(pause, deadline - time.monotonic())
        if remaining <= 0:
            return EXIT_GAVE_UP
        time.sleep(remaining)
        pause = min(2 * pause, _LONGEST_S)
        left = watch.look_again(left)


def has_ended(rows: Sequence[Row]) -> bool:
    """Return whether a job, or all elements of an array, have ended."""
    return all(state_of(row) == "ended" for row in rows)


def status_of(row: Row) -> int:
    """Return the exit code for an ended job."""
    ended = view(row, 0)
    if ended.outcome in _STATUS and ended.exit_status in (None, 0):
        return _STATUS[ended.outcome]
    if ended.outcome in ("lost", "launch_failed") or ended.exit_status is None:
        return ended.exit_status or EXIT_OWN_FAILURE
    return ended.exit_status


class Watch:
    """Asks Slurm about jobs again and again, and says once if it does not answer."""

    def __init__(self) -> None:
        self._is_away = False

    def look_again(self, jobs: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
        """Return what Slurm knows of jobs now, or what was known if it does not answer.

        A job that Slurm has forgotten has ended, and how is unknown.
        """
        try:
            rows = read_queue(jobs=list(jobs), each_element=True)
        except SlurmFailed as error:
            if "nvalid job id" not in error.message:
                if not self._is_away:
                    print_stderr(f"gpulease: {error.message}; waiting until it does")
                self._is_away = True
                return dict(jobs)
            rows = []
        self._is_away = False
        forgotten = {"state": "UNKNOWN", "exit_code": ""}
        return {
            job: [row for row in rows if is_of(job, row)] or [{**known[0], **forgotten}]
            for job, known in jobs.items()
        }

    def look_at(self, job: str, row: Row) -> Row:
        """Return what is known of one job now."""
        return self.look_again({job: [row]})[job][0]


def attach_to(wanted: Selection, *, watches: bool, has_keys: bool) -> int:
    """Show the output of a job that srun started and pass input on, until it ends.

    This process becomes sattach. A job that has ended is described, and its exit code returned.

    Raises:
        WrongState: the job waits, or is a batch job.
    """
    if has_keys:
        raise BadUsage(
            "cannot use --detach-keys on a cluster: sattach has none",
            "closing the terminal detaches; the job continues",
        )
    ((job, rows),) = select(wanted).items()
    if is_array(job, rows):
        raise BadUsage(
            f"cannot attach to array {job}: name one of its elements", f"such as {labels(rows)}"
        )
    if state_of(rows[0]) == "ended":
        print_stderr(f"gpulease: job {job} has ended: {outcome_of(view(rows[0], 0))}")
        return status_of(rows[0])
    if state_of(rows[0]) == "queued":
        raise WrongState(
            f"cannot attach to job {job}: it waits", f"gpulease show {job} shows what for"
        )
    if is_batch(rows[0].get("batchflag", "")):
        raise WrongState(
            f"cannot attach to job {job}: Slurm attaches only to what srun started, and this is a "
            "batch job",
            f"gpulease logs -f {job} follows its output",
        )
    if watches:
        # An input that ends would end that of the job: sattach keeps the other end of this one.
        reading, writing = os.pipe()
        os.dup2(reading, 0)
        os.set_inheritable(writing, True)
    return become(["sattach", f"{job}.0"], os.environ)
