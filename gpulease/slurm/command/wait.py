"""`gpulease wait` on a cluster, which asks squeue until jobs have ended, and `attach`: sattach."""

import os
import time
from collections.abc import Mapping, Sequence

from gpulease.cli.exit_codes import SIGNALED
from gpulease.cli.job_selection import Selection
from gpulease.cli.render import print_stderr
from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, BadUsage, SlurmFailed, WrongState
from gpulease.slurm.command.jobs import read_queue, state_of, view
from gpulease.slurm.command.selection import Row, is_array, is_of, labels, select
from gpulease.slurm.command.views import outcome_of
from gpulease.slurm.commands import become
from gpulease.slurm.records import is_batch

_FIRST_S, _LONGEST_S = 0.25, 5.0
"""Between two looks: each costs slurmctld a list of jobs."""
_SIGTERM = 15
_STATUS = {"cancelled": SIGNALED + _SIGTERM, "preempted": SIGNALED + _SIGTERM,
           "gave_up": EXIT_GAVE_UP}  # fmt: skip


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
