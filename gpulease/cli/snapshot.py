"""Copies of scripts and of directories, for jobs whose code may be edited while they wait.

The copy of /home/alice/train.py is .../snapshots/DIGEST/home/alice/train.py in the state directory
of the user. A Python script still imports its neighbours: their directory is first on PYTHONPATH.
A job with the copy of a directory runs in the copy, where what git ignores is linked.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp, mkstemp
from time import time

from gpulease import config
from gpulease.cli.script import script_place
from gpulease.errors import BadUsage, GpuleaseError, TooLarge
from gpulease.path_ownership import shaky
from gpulease.units import MIB, format_size

LARGEST = 16 * MIB
"""Bytes of a script."""
LARGEST_DIRECTORY = 256 * MIB
MOST_FILES = 20_000
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
        _keep(folder, copy.relative_to(folder).parts[0])
    except OSError as error:
        raise _not_copied(script, error) from error
    return copy


def take_directory(
    directory: str, argv: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[list[str], Path, dict[str, str]]:
    """Copy a directory; return the command, where it runs and the environment for the copy.

    What git ignores there is linked and not copied: data, outputs, environments.

    Raises:
        BadUsage: it is no directory, or `cwd` is not in it.
        TooLarge: there is more than LARGEST_DIRECTORY, or more than MOST_FILES.
        GpuleaseError: it cannot be copied.
    """
    root, here = Path(os.path.realpath(cwd / directory)), Path(os.path.realpath(cwd))
    if not root.is_dir():
        raise BadUsage(f"cannot take a snapshot of {directory}: no such directory")
    if not here.is_relative_to(root):
        raise BadUsage(
            f"cannot take a snapshot of {directory}: the working directory is not in it",
            "name the working directory, or one above it: --snapshot-dir .",
        )
    try:
        copy = _copied_directory(root)
    except OSError as error:
        raise _not_copied(root, error) from error

    def moved(path: str) -> str:
        """Return an absolute path in the directory as that of its copy; others stay."""
        real = Path(os.path.realpath(path))
        is_within = Path(path).is_absolute() and real.is_relative_to(root)
        return str(copy / real.relative_to(root)) if is_within else path

    command = list(argv)
    if (place := script_place(argv, str(cwd))) is not None:
        command[place] = moved(command[place])
    changed = {**environment, "GPULEASE_SUBMIT_DIR": str(cwd)}
    if path := changed.get("PYTHONPATH"):
        changed["PYTHONPATH"] = os.pathsep.join(map(moved, path.split(os.pathsep)))
    return command, copy / here.relative_to(root), changed


def _copied_directory(root: Path) -> Path:
    """Return the copy of a directory; the same content has one copy."""
    folder, below = _folder(), root.relative_to("/")
    fresh = Path(mkdtemp(dir=folder))
    try:
        digest, size, count = sha256(), 0, 0
        for source, is_ignored in _content(root):
            if source.is_relative_to(folder):
                continue  # a home is copied without its copies
            name = source.relative_to(root)
            target, found = fresh / below / name, source.lstat()
            link = source if is_ignored else source.readlink() if source.is_symlink() else None
            size, count = size + (found.st_size if link is None else 0), count + 1
            if size > LARGEST_DIRECTORY or count > MOST_FILES:
                raise TooLarge(
                    f"cannot take a snapshot of {root}: it has more than {MOST_FILES} files, or "
                    f"more than {format_size(LARGEST_DIRECTORY)}",
                    "list data and outputs in its .gitignore: what git ignores is linked, and not "
                    "copied",
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            digest.update(os.fsencode(f"{name}\0{found.st_mode}\0{link or ''}\0"))
            if link is not None:
                target.symlink_to(link)
                continue
            content = source.read_bytes()
            digest.update(sha256(content).digest())
            target.write_bytes(content)
            target.chmod(found.st_mode & 0o700)
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        (fresh / below).mkdir(parents=True, exist_ok=True)
        final = folder / digest.hexdigest()[:16]
        if not final.exists():
            fresh.rename(final)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _keep(folder, final.name)
    return final / below


def _content(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the files of a directory, and what git ignores there (True).

    The files are those that git tracks or would add, of submodules too; without git, all.
    """
    known = _git_files(root, "--cached", "--others")
    if known is None:
        yield from ((each, False) for each in _all_files(root))
        return
    for path in known:
        if path.is_symlink() or path.is_file():
            yield path, False
        elif path.is_dir():
            yield from _content(path)
    for path in _git_files(root, "--others", "--ignored", "--directory") or ():
        # A cache of Python names the files that it is of.
        if path.name != "__pycache__" and path.suffix != ".pyc":
            yield path, True


def _all_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or path.is_file():
            yield path
        elif path.is_dir() and path.name != ".git":
            yield from _all_files(path)


def _git_files(directory: Path, *which: str) -> list[Path] | None:
    """Return files of a directory as git has them; None without git or outside of a checkout."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "--exclude-standard", *which]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        return None
    return [directory / name for name in sorted(set(os.fsdecode(done.stdout).split("\0")) - {""})]


def _keep(folder: Path, name: str) -> None:
    """Note that a copy is used now, and remove those that have not been used for long."""
    os.utime(folder / name)
    for old in folder.iterdir():
        if time() - old.stat().st_mtime > _KEPT.total_seconds():
            shutil.rmtree(old, ignore_errors=True)


def _not_copied(what: Path, error: OSError) -> GpuleaseError:
    return GpuleaseError(f"cannot take a snapshot: {error.filename or what}: {error.strerror}")


def _folder() -> Path:
    state = config.personal_state()
    if why := shaky(state, os.geteuid()):
        raise GpuleaseError(f"cannot take a snapshot: {why}", "copies lie in your XDG_STATE_HOME")
    folder = state / _FOLDER
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
