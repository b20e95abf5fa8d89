"""`gpulease wait` on a cluster: ask squeue until jobs have ended."""

import time
from collections.abc import Mapping, Sequence

from gpulease.cli.exit_codes import SIGNALED
from gpulease.cli.job_selection import Selection
from gpulease.cli.render import print_stderr
from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, SlurmFailed
from gpulease.slurm.command.jobs import read_queue, state_of, view
from gpulease.slurm.command.selection import Row, is_of, select

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
                self._say(error)
                return dict(jobs)
            rows = []
        self._is_away = False
        return {
            job: [row for row in rows if is_of(job, row)] or [_forgotten(known[0])]
            for job, known in jobs.items()
        }

    def look_at(self, job: str, row: Row) -> Row:
        """Return what is known of one job now."""
        return self.look_again({job: [row]})[job][0]

    def _say(self, error: SlurmFailed) -> None:
        if not self._is_away:
            print_stderr(f"gpulease: {error.message}; waiting until it does")
        self._is_away = True


def _forgotten(row: Row) -> Row:
    return {**row, "state": "UNKNOWN", "exit_code": ""}
