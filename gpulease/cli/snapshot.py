"""Copies of scripts, for jobs whose script may be edited while they wait.

The copy of /home/alice/train.py is .../snapshots/DIGEST/home/alice/train.py in the state directory
of the user. A Python script still imports its neighbours: their directory is first on PYTHONPATH.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp
from time import time

from gpulease import config
from gpulease.cli.script import script_place
from gpulease.errors import BadUsage, GpuleaseError, TooLarge
from gpulease.path_ownership import shaky
from gpulease.units import MIB, format_size

LARGEST = 16 * MIB
_FOLDER = "snapshots"
"""Domain code that compares commands knows this name, and what follows it."""
_KEPT = timedelta(days=90)
"""How long a copy is kept that no further job has used."""


def take_snapshot(
    argv: Sequence[str], cwd: Path, environment: Mapping[str, str], *, must: bool = True
) -> tuple[list[str], dict[str, str]]:
    """Copy the script of a command; return the command and the environment that run the copy.

    A command without a script stays as typed if there need not be one (not `must`).

    Raises:
        BadUsage: the command names no script, and it must.
        TooLarge: the script is larger than LARGEST.
        GpuleaseError: the script cannot be copied.
    """
    place = script_place(argv, str(cwd))
    if place is None and not must:
        return list(argv), dict(environment)
    if place is None:
        raise BadUsage(
            f"cannot take a snapshot: {argv[0]} is no script, and no script follows it",
            "--snapshot copies a script: gpulease run --snapshot train.py",
        )
    script = Path(os.path.normpath(cwd / argv[place]))
    copy = _copied(script)
    changed = dict(environment)
    if script.suffix == ".py":
        path = (str(script.resolve().parent), changed.get("PYTHONPATH"))
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return [*argv[:place], str(copy), *argv[place + 1 :]], changed


def _copied(script: Path) -> Path:
    try:
        size = script.stat().st_size
        if size > LARGEST:
            raise TooLarge(
                f"cannot take a snapshot: {script} has {format_size(size)}, "
                f"and a snapshot at most {format_size(LARGEST)}",
                "--snapshot is for scripts; leave it out",
            )
        content = script.read_bytes()
        folder = _folder()
        copy = folder / sha256(content).hexdigest()[:16] / script.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        # A job that starts at this moment reads the old file or the new one: both are the same.
        handle, fresh = mkstemp(dir=copy.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(fresh).chmod(script.stat().st_mode & 0o700)
        Path(fresh).replace(copy)
        os.utime(folder / copy.relative_to(folder).parts[0])
        for old in folder.iterdir():
            if time() - old.stat().st_mtime > _KEPT.total_seconds():
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        where = error.filename or script
        raise GpuleaseError(f"cannot take a snapshot: {where}: {error.strerror}") from error
    return copy


def _folder() -> Path:
    state = config.personal_state()
    if why := shaky(state, os.geteuid()):
        raise GpuleaseError(f"cannot take a snapshot: {why}", "copies lie in your XDG_STATE_HOME")
    folder = state / _FOLDER
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
