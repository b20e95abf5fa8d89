"""How `gpulease run` hands a job to Slurm: it becomes srun, or with -d has sbatch take a script."""

import math
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from gpulease.cli.caller import is_ours
from gpulease.cli.render import print_stderr
from gpulease.drawing.words import clean
from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, SlurmFailed
from gpulease.slurm.commands import DEADLINE_S, become, no_answer, not_installed

_KEPT_FOR_S = 30 * 24 * 3600
_EXIT_CODES = {
    "SLURM_EXIT_ERROR": str(EXIT_OWN_FAILURE),
    "SLURM_EXIT_IMMEDIATE": str(EXIT_GAVE_UP),
}
"""What srun exits with if it starts no job, in place of 1."""

# bash, since dash removes variables that it cannot name, such as exported functions.
_BASH = "/bin/bash"
_ENTER = """\
cd -- {cwd} || {{ echo "gpulease: this directory is not on $SLURMD_NODENAME" >&2; exit 125; }}
"""
"""Slurm would run the command in /tmp."""
_BATCH = f"#!{_BASH}\n{_ENTER}exec -- {{command}}\n"
_FOREGROUND = f"""\
{_ENTER.format(cwd='"$1"')}shift
unset {" ".join(_EXIT_CODES)}
[ "$SLURM_PROCID" != 0 ] ||
echo "gpulease: job $SLURM_JOB_ID started on $SLURMD_NODENAME, GPU $SLURM_STEP_GPUS" >&2
exec -- "$@"
"""


def srun_line(words: Sequence[str], argv: Sequence[str], cwd: str, *, pty: bool) -> list[str]:
    """Return the command line of srun; `words` are its options."""
    # Without a status, srun passes the first SIGINT on.
    line = ["srun", "--disable-status", *(["--pty"] if pty else []), *words]
    return [*line, "--", _BASH, "-c", _FOREGROUND, "gpulease", cwd, *argv]


def become_srun(line: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by srun.

    Raises:
        SlurmFailed: it cannot be started.
    """
    become(line, {**variables, **_EXIT_CODES})


def in_background() -> bool:
    """Return whether a shell has started this in the background of its terminal.

    The kernel stops such a process as soon as it reads the terminal.
    """
    return os.isatty(0) and not is_ours(0)


def immediate(wait: float) -> str:
    """Return the option of srun for a time that a job may wait, in seconds."""
    # To srun, 1 means that the job starts at once or not at all.
    return f"--immediate={max(2, math.ceil(wait))}" if wait else "--immediate"


def batch_line(words: Sequence[str], *, is_array: bool) -> list[str]:
    """Return the command line of sbatch; `words` are its options."""
    return ["sbatch", "--parsable", "--open-mode=append", *_outputs(is_array), *words]


def batch_script(argv: Sequence[str], cwd: str) -> str:
    """Return a script that becomes `argv`."""
    return _BATCH.format(cwd=shlex.quote(cwd), command=shlex.join(argv))


def submit_batch(line: Sequence[str], script: str, variables: Mapping[str, str]) -> str:
    """Submit a script, and return the id of the job.

    Raises:
        SlurmFailed: Slurm does not accept it.
    """
    try:
        done = subprocess.run(
            line, input=script, env=dict(variables), capture_output=True, timeout=3 * DEADLINE_S,
            check=False, encoding="utf-8", errors="surrogateescape",
        )  # fmt: skip
    except FileNotFoundError:
        raise not_installed(line) from None
    except subprocess.TimeoutExpired:
        raise no_answer(line, 3 * DEADLINE_S) from None
    if done.returncode != 0:
        raise SlurmFailed(f"cannot submit the job: {_why(done.stderr)}")
    # With several clusters, the name of the cluster follows.
    return done.stdout.strip().split(";")[0]


def _why(errors: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in errors.splitlines()]
    return clean("; ".join(lines)) or "sbatch failed"


def _outputs(is_array: bool) -> list[str]:
    """Return where Slurm writes the output: into the home that nodes share, if that can be."""
    job = "%A_%a" if is_array else "%j"
    try:
        folder = str(_prepared_directory()).replace("%", "%%")
    except OSError as error:
        print_stderr(
            "gpulease: the output goes to slurm-JOB.out in this directory: "
            f"your home cannot be written: {error.strerror}"
        )
        return []
    return [f"--output={folder}/{job}.out", f"--error={folder}/{job}.err"]


def _prepared_directory() -> Path:
    """Make the directory of output, and return it; files of long ago are removed.

    Raises:
        OSError: it cannot be made.
    """
    from gpulease.slurm.command.output import output_directory

    folder = output_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "Permission denied", str(folder))
    oldest = time.time() - _KEPT_FOR_S
    for entry in os.scandir(folder):
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < oldest:
                Path(entry.path).unlink()
    return folder
