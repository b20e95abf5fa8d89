"""Which cluster this machine is part of: what the environment or the settings files name.

Every command imports this file, so it reads files by itself, and parses only those that matter.
"""

from __future__ import annotations

import os

from gpulease.errors import BadUsage
from gpulease.locations import SYSTEM_CONFIG, personal_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLE = "GPULEASE_CLUSTER"
_KEY = "cluster"
SLURM, NONE = "slurm", "none"


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
    return _parsed(path) if has_word else None


def _parsed(path: str) -> str | None:
    from pathlib import Path

    from gpulease.setting_parsers import Mistakes, one_of, read_toml

    file = Path(path)
    if (value := read_toml(file).get(_KEY)) is None:
        return None
    mistakes = Mistakes(file)
    named = mistakes.parse(_KEY, value, one_of(NONE, SLURM))
    mistakes.raise_if_any()
    return str(named)
