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


def run_slurm(argv: Sequence[str], deadline: float = DEADLINE_S) -> str:
    """Run a command such as ("scontrol", "show", "node"), and return its output.

    Raises:
        SlurmFailed: it is not installed, failed, or took longer than `deadline` seconds.
    """
    done = call(argv, slurm_environment(os.environ), deadline)
    if done.returncode == 0:
        return done.stdout
    why = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    if any(each in why for each in _AWAY):
        raise SlurmFailed("cannot ask Slurm: slurmctld does not answer", _PING)
    raise SlurmFailed(f"Slurm refused `{' '.join(argv[:3])}`: {why}")


def call(
    argv: Sequence[str], environment: Mapping[str, str], deadline: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command in this environment with a text as its input, and return what became of it.

    Raises:
        SlurmFailed: it is not installed, or took longer than `deadline` seconds.
    """
    try:
        done = subprocess.run(
            argv, env=dict(environment), input=text.encode("utf-8", "surrogateescape"),
            capture_output=True, timeout=deadline, check=False,
        )  # fmt: skip
    except OSError as error:
        raise _not_started(argv, error) from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(
            f"cannot ask Slurm: {argv[0]} did not answer within {deadline:.0f} s", _PING
        ) from None
    # Not decoded by subprocess, which would translate line breaks within the names of jobs.
    output, errors = (
        each.decode("utf-8", "surrogateescape") for each in (done.stdout, done.stderr)
    )
    return subprocess.CompletedProcess(argv, done.returncode, output, errors)


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
    except OSError as error:
        raise _not_started(line, error) from None


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command, so that its output can be parsed."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_DEFAULTS)}
    return {**kept, **_C}


def _not_started(argv: Sequence[str], error: OSError) -> SlurmFailed:
    if not isinstance(error, FileNotFoundError):
        return SlurmFailed(f"cannot start {argv[0]}: {error.strerror}")
    return SlurmFailed(
        f"cannot ask Slurm: {argv[0]} is not installed here",
        'install the client of Slurm (slurm-client), or set cluster = "none" in '
        "/etc/gpulease/config.toml",
    )
