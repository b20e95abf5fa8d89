"""`gpulease run -d` on a cluster: sbatch with a script of quoted words."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence

from gpulease.cli.cluster.output_log import output_directory
from gpulease.cli.format import clean
from gpulease.cli.render import print_stderr
from gpulease.errors import SlurmFailed
from gpulease.slurm.commands import DEADLINE_S, no_answer, not_installed

# bash, since dash removes variables that it cannot name, such as exported functions.
_SCRIPT = """\
#!/bin/bash
cd -- {cwd} || {{ echo "gpulease: this directory is not on $SLURMD_NODENAME" >&2; exit 125; }}
exec -- {command}
"""


def batch_line(words: Sequence[str], *, is_array: bool) -> list[str]:
    """Return the command line; `words` are the options of sbatch."""
    return ["sbatch", "--parsable", "--open-mode=append", *_outputs(is_array), *words]


def batch_script(argv: Sequence[str], cwd: str) -> str:
    """Return a script that becomes `argv`."""
    return _SCRIPT.format(cwd=shlex.quote(cwd), command=shlex.join(argv))


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
        folder = str(output_directory()).replace("%", "%%")
    except OSError as error:
        print_stderr(
            "gpulease: the output goes to slurm-JOB.out in this directory: "
            f"your home cannot be written: {error.strerror}"
        )
        return []
    return [f"--output={folder}/{job}.out", f"--error={folder}/{job}.err"]
