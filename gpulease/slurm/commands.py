"""Runs Slurm's commands, with a time limit: slurmctld may be away."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from gpulease.errors import SlurmFailed

DEADLINE_S = 10.0
_C = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def run_slurm(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ, deadline: float = DEADLINE_S
) -> str:
    """Run a command such as ("scontrol", "show", "node"), and return its output.

    Raises:
        SlurmFailed: it is not installed, failed, or took longer than `deadline` seconds.
    """
    name = argv[0]
    try:
        done = subprocess.run(
            argv, env={**environment, **_C}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=deadline, check=False, encoding="utf-8", errors="surrogateescape",
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmFailed(
            f"cannot ask Slurm: {name} is not installed here",
            'install the client of Slurm (slurm-client), or set cluster = "none" in '
            "/etc/gpulease/config.toml",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(
            f"cannot ask Slurm: {name} did not answer within {deadline:.0f} s",
            "check that slurmctld runs: scontrol ping",
        ) from None
    if done.returncode != 0:
        why = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise SlurmFailed(
            f"Slurm refused `{' '.join(argv[:3])}`: {why}",
            "scontrol ping shows whether slurmctld answers",
        )
    return done.stdout
