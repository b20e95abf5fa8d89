"""Scripts that are edited while their job waits: copies of them, and what `show` says.

The copy of /home/alice/train.py is .../snapshots/DIGEST/home/alice/train.py in the state directory
of the user. A Python script still imports its neighbours: their directory is first on PYTHONPATH.
"""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp
from time import time

from gpulease import config
from gpulease.cli.format import clean, instant
from gpulease.errors import BadUsage, GpuleaseError, TooLarge
from gpulease.path_ownership import shaky
from gpulease.units import MIB, format_size
from gpulease.wire.jobs import JobView
from gpulease.wire.requests import from_wire

LARGEST = 16 * MIB
_FOLDER = "snapshots"
"""Domain code that compares commands knows this name, and what follows it."""
_SUFFIXES = frozenset({".py", ".sh", ".bash", ".R", ".r", ".jl", ".pl", ".rb", ".lua"})
_NO_FILE = frozenset({"-c", "-m", "-e"})
"""Options of interpreters after which the program is no file."""
_KEPT = timedelta(days=90)
"""How long a copy is kept that no further job has used."""
_CLOCKS_DIFFER = timedelta(seconds=0.1)
"""A file on another machine has its time from there."""


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
    place = script_place(argv, cwd)
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


def script_place(argv: Sequence[str], cwd: Path) -> int | None:
    """Return which word of a command is the script that it runs; None if none is."""
    if argv and "/" in argv[0] and _begins_as_script(cwd / argv[0]):
        return 0
    for place, word in enumerate(argv[1:], 1):
        if word in _NO_FILE:
            return None
        if not word.startswith("-") and _is_script(cwd / word):
            return place
    return None


def script_change(job: JobView) -> str | None:
    """Say if the script of a job changed since its submission, as far as the caller can see it."""
    if job.cwd is None or job.state not in ("queued", "granted", "active"):
        return None
    try:
        name, changed_at = _script_of(job, Path(from_wire(job.cwd)))
    except (OSError, ValueError):
        return None
    if changed_at <= instant(job.submitted_at) + _CLOCKS_DIFFER:
        return None
    if job.started_at is None:
        return f"{name} changed since submission; the job will run the new version"
    if changed_at < instant(job.started_at):
        return f"{name} changed since submission; the job runs the new version"
    return f"{name} changed since submission, after the job had started"


def _script_of(job: JobView, cwd: Path) -> tuple[str, datetime]:
    """Return the script of a job as its command names it, and when it changed.

    Raises:
        ValueError: there is none, or the command is cut short.
        OSError: the caller cannot see it.
    """
    argv = shlex.split(job.command)
    place = script_place(argv, cwd)
    if place is None:
        raise ValueError("no script")
    changed_at = datetime.fromtimestamp((cwd / argv[place]).stat().st_mtime, UTC)
    return clean(argv[place]), changed_at


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
        _write(copy, content, script.stat().st_mode)
        os.utime(folder / copy.relative_to(folder).parts[0])
        _remove_unused(folder)
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


def _write(copy: Path, content: bytes, mode: int) -> None:
    # A job that starts at this moment reads the old file or the new one, and both are the same.
    handle, fresh = mkstemp(dir=copy.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(fresh).chmod(mode & 0o700)
    Path(fresh).replace(copy)


def _remove_unused(folder: Path) -> None:
    for old in folder.iterdir():
        if time() - old.stat().st_mtime > _KEPT.total_seconds():
            shutil.rmtree(old, ignore_errors=True)


def _is_script(path: Path) -> bool:
    return path.is_file() and (path.suffix in _SUFFIXES or _begins_as_script(path))


def _begins_as_script(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False
