"""Runs Slurm's commands, with a time limit: slurmctld may be away."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from gpulease.errors import SlurmFailed

DEADLINE_S = 10.0
_C = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "64"}
_DEFAULTS = ("SQUEUE_", "SCANCEL_", "SCONTROL_")
"""Variables with a user's defaults for the commands, which would change what they print or do."""
_AWAY = ("Unable to contact slurm controller", "Socket timed out")


def run_slurm(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ, deadline: float = DEADLINE_S
) -> str:
    """Run a command such as ("scontrol", "show", "node"), and return its output.

    Raises:
        SlurmFailed: it is not installed, failed, or took longer than `deadline` seconds.
    """
    name = argv[0]
    kept = {key: value for key, value in environment.items() if not key.startswith(_DEFAULTS)}
    try:
        done = subprocess.run(
            argv, env={**kept, **_C}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=deadline, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmFailed(
            f"cannot ask Slurm: {name} is not installed here",
            'install the client of Slurm (slurm-client), or set cluster = "none" in '
            "/etc/gpulease/config.toml",
        ) from None
    except subprocess.TimeoutExpired:
        raise _away(f"{name} did not answer within {deadline:.0f} s") from None
    if done.returncode != 0:
        raise _failed(argv, " ".join(_text(done.stderr or done.stdout).split()), done.returncode)
    return _text(done.stdout)


def _failed(argv: Sequence[str], why: str, status: int) -> SlurmFailed:
    if any(each in why for each in _AWAY):
        return _away("slurmctld does not answer")
    return SlurmFailed(f"Slurm refused `{' '.join(argv[:3])}`: {why or f'exit code {status}'}")


def _away(why: str) -> SlurmFailed:
    return SlurmFailed(f"cannot ask Slurm: {why}", "scontrol ping shows whether slurmctld runs")


def _text(output: bytes) -> str:
    # Not by subprocess, which would translate line breaks within names of jobs.
    return output.decode("utf-8", "surrogateescape")
