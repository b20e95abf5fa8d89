"""Which cluster this machine is part of, and whether a command acts on its jobs.

Every command imports this file, so it reads files by itself, and parses only those that matter.
"""

from __future__ import annotations

import os

from gpulease.errors import BadUsage
from gpulease.locations import SYSTEM_CONFIG, environment, personal_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_VARIABLE = "GPULEASE_CLUSTER"
_KEY = "cluster"
SLURM, NONE = "slurm", "none"
_LEASE, _SLURM_JOB = "GPULEASE_JOB", "SLURM_JOB_ID"
VERBS = frozenset({
    "run", "status", "list", "show", "logs", "cancel", "attach", "extend", "wait",
})  # fmt: skip
"""The verbs that can act on Slurm; the others are for the daemon of this machine."""


def cluster(variables: Mapping[str, str], system: str = SYSTEM_CONFIG) -> str:
    """Return "slurm" or "none": of the environment, the user's file, or that of the machine."""
    if named := variables.get(_VARIABLE):
        if named not in (SLURM, NONE):
            raise BadUsage(
                f"cannot use {_VARIABLE}={named[:40]}: there is no such cluster",
                f"set it to {SLURM} or {NONE}",
            )
        return named
    try:
        personal = personal_config(variables)
    except OSError:
        personal = None
    return _named_in(personal) or _named_in(system) or NONE


def acts_on_slurm(socket: Path | str | None, *, new_lease: bool | None = None) -> bool:
    """Return whether Slurm is meant; `socket` is the value of --socket.

    With a socket, it is the daemon of this machine. So it is within a lease, for the verb that
    takes one (`new_lease` is its option), and for all others unless the lease is that of a job of
    Slurm: they name the job by Slurm's number.

    Raises:
        BadConfiguration: a file that names a cluster cannot be used.
        BadUsage: the variable cannot be used.
    """
    variables = environment()
    if socket is not None or variables.get("GPULEASE_SOCKET"):
        return False
    if new_lease is None:
        new_lease = bool(variables.get(_SLURM_JOB))
    if variables.get(_LEASE) and not new_lease:
        return False
    return cluster(variables) == SLURM


def may_be_a_node(system: str = SYSTEM_CONFIG) -> bool:
    """Return whether the daemon of this machine may have jobs of Slurm, whatever a user chose."""
    if os.path.isfile(system) and not os.access(system, os.R_OK):
        return True
    return _named_in(system) == SLURM


def _named_in(path: str | None) -> str | None:
    """Return the cluster that a settings file names; only files with the word are parsed."""
    if path is None or not os.path.isfile(path):  # a FIFO would never end
        return None
    try:
        with open(path, "rb") as file:
            has_word = _KEY.encode() in file.read()
    except OSError:  # the file of the machine may be for its admins only
        return None
    if not has_word:
        return None
    from pathlib import Path

    from gpulease.setting_parsers import one_of, read_keys

    named: str | None = read_keys(Path(path), {_KEY: one_of(NONE, SLURM)}).get(_KEY)
    return named
