"""Runs Slurm's commands, with a time limit: slurmctld may be away."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from gpulease.errors import SlurmFailed

DEADLINE_S = 10.0
_C = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "64"}
_DEFAULTS = ("SQUEUE_", "SCANCEL_", "SCONTROL_")
"""Variables with a user's defaults for the commands, which would change what they print or do."""
_PING = "scontrol ping shows whether slurmctld runs"
_AWAY = ("Unable to contact slurm controller", "Socket timed out")


def run_slurm(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ, deadline: float = DEADLINE_S
) -> str:
    """Run a command such as ("scontrol", "show", "node"), and return its output.

    Raises:
        SlurmFailed: it is not installed, failed, or took longer than `deadline` seconds.
    """
    try:
        done = subprocess.run(
            argv, env=slurm_environment(environment), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=deadline, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise not_installed(argv) from None
    except subprocess.TimeoutExpired:
        raise no_answer(argv, deadline) from None
    # Not decoded by subprocess, which would translate line breaks within the names of jobs.
    output, errors = (
        text.decode("utf-8", "surrogateescape") for text in (done.stdout, done.stderr)
    )
    return checked_output(argv, done.returncode, output, errors)


def become(line: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command of Slurm, which has the streams, signals and exit code.

    Raises:
        SlurmFailed: it cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the command
    try:
        os.execvpe(line[0], list(line), dict(variables))  # noqa: S606  that of the user's PATH
    except FileNotFoundError:
        raise not_installed(line) from None
    except OSError as error:
        raise SlurmFailed(f"cannot start {line[0]}: {error.strerror}") from None


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command, so that its output can be parsed."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_DEFAULTS)}
    return {**kept, **_C}


def checked_output(argv: Sequence[str], code: int | None, output: str, errors: str) -> str:
    """Return the output of a command that has ended.

    Raises:
        SlurmFailed: it failed.
    """
    if code == 0:
        return output
    why = " ".join((errors or output).split()) or f"exit code {code}"
    if any(each in why for each in _AWAY):
        raise SlurmFailed("cannot ask Slurm: slurmctld does not answer", _PING)
    raise SlurmFailed(f"Slurm refused `{' '.join(argv[:3])}`: {why}")


def not_installed(argv: Sequence[str]) -> SlurmFailed:
    """Return the error for a command that does not exist."""
    return SlurmFailed(
        f"cannot ask Slurm: {argv[0]} is not installed here",
        'install the client of Slurm (slurm-client), or set cluster = "none" in '
        "/etc/gpulease/config.toml",
    )


def no_answer(argv: Sequence[str], deadline: float) -> SlurmFailed:
    """Return the error for a command that ran longer than `deadline` seconds."""
    return SlurmFailed(
        f"cannot ask Slurm: {argv[0]} did not answer within {deadline:.0f} s",
        _PING,
    )
