"""Where the output of jobs of Slurm is.

slurmd writes that of a batch job to files that its owner named. That of a job in the foreground
goes to the srun that started it, and is kept nowhere.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gpulease.drawing.words import clean
from gpulease.errors import GpuleaseError, SlurmFailed, WrongState
from gpulease.locations import environment
from gpulease.slurm.command.selection import Row
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.records import is_batch, stream_files


@dataclass(frozen=True)
class Output:
    """The files with the output of a job; `stderr` is None if `stdout` has both."""

    stdout: Path
    stderr: Path | None = None


def output_directory() -> Path:
    """Return where `gpulease run -d` has Slurm write output: in the home, which nodes may share."""
    home = environment().get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "gpulease" / "slurm"


def output_of(job: str, row: Row) -> Output:
    """Return where the output of a job is; the files need not exist, or not here.

    Raises:
        SlurmFailed: Slurm does not answer.
        WrongState: the output is kept nowhere.
    """
    if not is_batch(row.get("batchflag", "")):
        raise WrongState(
            f"cannot print the output of job {row['jobid']}: it goes to the command that started "
            "it, and is not kept",
            f"gpulease attach {job} shows what follows while it runs; gpulease run -d writes files",
        )
    stdout, stderr = stream_files(run_slurm(["scontrol", "show", "job", job]))
    if stdout is None:
        raise WrongState(f"cannot print the output of job {job}: Slurm names no file for it")
    return Output(Path(stdout), Path(stderr) if stderr not in (None, stdout) else None)


def described(job: str, row: Row) -> str | None:
    """Return the names of the files for people; None if there are none."""
    try:
        found = output_of(job, row)
    except (SlurmFailed, WrongState):
        return None
    return ", ".join(clean(str(path)) for path in (found.stdout, found.stderr) if path)


def open_output(path: Path, job: str) -> int | None:
    """Open a file with output; None if there is none here.

    Raises:
        WrongState: it cannot be read here.
    """
    try:
        # The owner of a job names its files: a FIFO must not block who reads them.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, job, None, error.strerror or str(error)) from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise unreadable(path, job, None, "it is not a regular file")
    return opened


def unreadable(path: Path, job: str, node: str | None, why: str) -> GpuleaseError:
    """Return the error for output that is not readable on this machine."""
    shown = clean(str(path))
    hint = None
    if node:
        hint = (
            f"if homes are not shared, it is on {clean(node)}: "
            f"srun --overlap --jobid={job} cat {shown} prints it while the job runs"
        )
    return WrongState(f"cannot print the output of job {job}: {shown}: {why}", hint)
