"""The process that the command is: what a job takes after, and what its terminal is like."""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulease import config
from gpulease.errors import GpuleaseError


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that a job takes after."""

    cwd: str
    environment: Mapping[str, str]
    umask: int
    soft_limits: Mapping[str, int]
    """By the names of resource.RLIMIT_*; -1 is unlimited."""
    nice: int


def this_process() -> Caller:
    """Describe the process that calls.

    Raises:
        GpuleaseError: its working directory is gone.
    """
    return Caller(
        cwd=working_directory(),
        environment=dict(environment()),
        umask=_umask(),
        soft_limits=_soft_limits(),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
    )


def environment() -> Mapping[str, str]:
    """Return the environment: cargo for a job; of its settings only those of terminals are ours."""
    return config.environment()


def working_directory() -> str:
    """Return the working directory.

    Raises:
        GpuleaseError: it is gone, or may not be looked up.
    """
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise GpuleaseError(
            "cannot run here: the working directory has been removed",
            "change to a directory that exists, and try again",
        ) from None
    except OSError as error:
        raise GpuleaseError(f"cannot run here: the working directory: {error.strerror}") from error


def _umask() -> int:
    # The kernel has no call that only reads it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _soft_limits() -> dict[str, int]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name))[0] for name in names}
