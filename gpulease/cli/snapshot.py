"""Copies of scripts and of directories, for jobs whose code may be edited while they wait.

The copy of /home/alice/train.py is .../snapshots/DIGEST/home/alice/train.py in the state directory
of the user. A Python script still imports its neighbours: their directory is first on PYTHONPATH.
A job with the copy of a directory runs in the copy, where what git ignores is linked.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import mkstemp
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
_NO_CODE = frozenset({".git", "__pycache__"})
"""Neither copied nor linked: a cache of Python names the files that it is of."""
_FOLDER = "snapshots"
"""Domain code that compares commands knows this name, and what follows it."""
_KEPT = timedelta(days=90)
"""How long a copy is kept that no further job has used."""
_UNFINISHED = ".part"
_COPIED_WITHIN = timedelta(days=1)
"""An unfinished copy that is older was left by a command that was killed."""


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
        BadUsage: as `directory_to_copy`.
        TooLarge: there is more than LARGEST_DIRECTORY, or more than MOST_FILES.
        GpuleaseError: it cannot be copied.
    """
    root = directory_to_copy(directory, argv, cwd)
    here, place = Path(os.path.realpath(cwd)), script_place(argv, str(cwd))
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
    if place is not None:
        command[place] = moved(command[place])
    changed = {**environment, "GPULEASE_SUBMIT_DIR": str(cwd)}
    if entries := changed.get("PYTHONPATH"):
        changed["PYTHONPATH"] = os.pathsep.join(map(moved, entries.split(os.pathsep)))
    return command, copy / here.relative_to(root), changed


def directory_to_copy(directory: str, argv: Sequence[str], cwd: Path) -> Path:
    """Return the directory that a job is to have a copy of, without links.

    Raises:
        BadUsage: it is no directory, or the working directory or the script is not in it.
    """
    root, here = Path(os.path.realpath(cwd / directory)), Path(os.path.realpath(cwd))
    refused = f"cannot take a snapshot of {directory}"
    if not directory or not root.is_dir():
        raise BadUsage(f"{refused}: it is not a directory", "--snapshot-dir . train.py")
    place = script_place(argv, str(cwd))
    script = here if place is None else Path(os.path.realpath(cwd / argv[place]))
    for what, path in (("the working directory", here), ("the script", script)):
        if not path.is_relative_to(root):
            raise BadUsage(
                f"{refused}: {what} is not in it",
                "name a directory above both: --snapshot-dir .",
            )
    return root


def _copied_directory(root: Path) -> Path:
    """Return a new copy of a directory: a job may change files in it, so no two share one."""
    folder = _folder()
    made = folder / (token_hex(8) + _UNFINISHED)
    within = root.relative_to("/")
    try:
        _copy(root, made / within, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    made = made.rename(made.with_suffix(""))
    _keep(folder, made.name)
    return made / within


def _copy(root: Path, copy: Path, folder: Path) -> None:
    """Copy a directory, but for `folder`, which has the copies; a home may contain it."""
    size, count, apart = 0, 0, {folder}
    for source, is_ignored in _content(root):
        if source.is_relative_to(folder):
            continue
        target, found = copy / source.relative_to(root), source.lstat()
        link = source if is_ignored else _link(source, root)
        size, count = size + (found.st_size if link is None else 0), count + 1
        if size > LARGEST_DIRECTORY or count > MOST_FILES:
            is_large = size > LARGEST_DIRECTORY
            most = format_size(LARGEST_DIRECTORY) if is_large else f"{MOST_FILES} files"
            raise TooLarge(
                f"cannot take a snapshot of {root}: it has more than {most}",
                "in a checkout of git, what .gitignore lists (data, outputs) is linked, and not "
                "copied; elsewhere, name a smaller directory",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        if link is not None:
            target.symlink_to(link)
            apart.add(source)
            continue
        target.write_bytes(source.read_bytes())
        target.chmod(found.st_mode & 0o700)
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
    for where, folders, _ in os.walk(root):
        parent = Path(where)
        # A job may write into a directory that is empty now.
        (copy / parent.relative_to(root)).mkdir(parents=True, exist_ok=True)
        at = [parent / name for name in folders]
        folders[:] = [each.name for each in at if each.name not in _NO_CODE and each not in apart]


def _link(source: Path, root: Path) -> Path | None:
    """Return where a link leads, seen from the copy; None: it is a file."""
    if not source.is_symlink():
        return None
    to = source.readlink()
    target = Path(os.path.normpath(source.parent / to))
    return to if target.is_relative_to(root) else target


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
        elif (path / ".git").exists():  # a submodule that was not fetched is empty
            yield from _content(path)
    for path in _git_files(root, "--others", "--ignored", "--directory") or ():
        if path.name not in _NO_CODE and path.suffix != ".pyc":
            yield path, True


def _all_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or path.is_file():
            yield path
        elif path.is_dir() and path.name not in _NO_CODE:
            yield from _all_files(path)


def _git_files(directory: Path, *which: str) -> list[Path] | None:
    """Return files of a directory as git has them; None without git or outside of a checkout."""
    # Nothing that the checkout configures is run: it may be somebody else's.
    options = ("-c", "safe.bareRepository=explicit", "-c", "core.fsmonitor=false")
    command = ["git", *options, "ls-files", "-z", "--exclude-standard", *which]
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        return None
    if b"not a git repository" in done.stderr or b"cannot use bare repository" in done.stderr:
        return None
    if done.returncode != 0:
        why = os.fsdecode(done.stderr).partition("\n")[0]
        raise GpuleaseError(f"cannot take a snapshot of {directory}: git says: {why}")
    return [directory / name for name in sorted(set(os.fsdecode(done.stdout).split("\0")) - {""})]


def _keep(folder: Path, name: str) -> None:
    """Note that a copy is used now, and remove those that have not been used for long."""
    os.utime(folder / name)
    for old in folder.iterdir():
        with suppress(FileNotFoundError):  # another submission has removed it
            kept = _COPIED_WITHIN if old.suffix == _UNFINISHED else _KEPT
            if time() - old.stat().st_mtime > kept.total_seconds():
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
