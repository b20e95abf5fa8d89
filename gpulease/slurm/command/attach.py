"""`gpulease attach` on a cluster: sattach."""

import os
from typing import NoReturn

from gpulease.cli.job_selection import Selection
from gpulease.cli.render import print_stderr
from gpulease.errors import BadUsage, WrongState
from gpulease.slurm.command.job_lines import outcome_of
from gpulease.slurm.command.jobs import state_of, view
from gpulease.slurm.command.selection import Row, is_array, labels, select
from gpulease.slurm.command.wait import status_of
from gpulease.slurm.commands import become, run_slurm


def attach_to(wanted: Selection, *, watches: bool, has_keys: bool) -> int:
    """Show the output of a job that srun started and pass input on, until it ends.

    This process becomes sattach. A job that has ended is described, and its exit code returned.

    Raises:
        WrongState: the job waits, or has no step to attach to.
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
    return _become_sattach(_step_of(job, rows[0]), watches=watches)


def _step_of(job: str, row: Row) -> str:
    """Return the newest step that srun started in a job."""
    if state_of(row) == "queued":
        raise WrongState(
            f"cannot attach to job {job}: it waits", f"gpulease show {job} shows what for"
        )
    # Ids of steps have no text of users.
    line = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"]
    steps = [step.strip() for step in run_slurm(line).split("\n")]
    numbered = [step for step in steps if step.rpartition(".")[2].isdecimal()]
    if not numbered:
        raise WrongState(
            f"cannot attach to job {job}: Slurm attaches only to what srun started, and this is a "
            "batch job",
            f"gpulease logs -f {job} follows its output",
        )
    return max(numbered, key=lambda step: int(step.rpartition(".")[2]))


def _become_sattach(step: str, *, watches: bool) -> NoReturn:
    if watches:
        # An input that ends would end that of the job: sattach keeps the other end of this one.
        reading, writing = os.pipe()
        os.dup2(reading, 0)
        os.set_inheritable(writing, True)
    become(["sattach", step], os.environ)
