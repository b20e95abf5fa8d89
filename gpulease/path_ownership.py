"""Checks of who can replace, change or read a path.

A root daemon opens its files by name. A user who can rename a directory of the path, or create the
file first, would control what root reads, writes and runs.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulease.errors import BadConfiguration

_ROOT = 0
_MOST_LINKS = 40
"""The kernel's limit for one lookup."""


def shaky(path: Path, uid: int) -> str | None:
    """Return why another user may control `path`, as a sentence; None if only `uid` and root can.

    For root, checks every directory of the path. For other users, checks the last part only, since
    they cannot choose the permissions of shared directories. Missing parts pass.
    """
    if uid != _ROOT:
        return _wrong_owner(path, uid) if os.path.lexists(path) else None
    for part in _passed(path):
        if os.path.lexists(part) and (why := _wrong_owner(part, uid) or open_to_others(part)):
            return why
    return None


def changeable(path: Path, uid: int) -> str | None:
    """Return why others than `uid` and root can change a file; None if they cannot.

    For root, checks every directory of the path, as `shaky` does; for other users, the file only.
    """
    if uid == _ROOT:
        return shaky(path, uid)
    found = path.stat()
    if found.st_uid not in (uid, _ROOT):
        return f"{path} belongs to user {found.st_uid}"
    return f"all users may write to {path}" if found.st_mode & stat.S_IWOTH else None


def _passed(path: Path) -> Iterator[Path]:
    """Yield each directory and link that a lookup of `path` passes, as path_resolution(7) does."""
    here, links = Path("/"), 0
    ahead = list(reversed(path.absolute().parts))
    while ahead:
        step = here / ahead.pop()
        if step.name == "..":
            here = here.parent
            continue
        yield step
        if step.is_symlink() and links < _MOST_LINKS:
            links += 1
            # The first part of an absolute target is "/", which restarts the lookup there.
            ahead += reversed(step.readlink().parts)
        else:
            here = step


def _wrong_owner(path: Path, uid: int) -> str | None:
    """Check a link and its target: the owner of a link can change where it points."""
    owners = {path.lstat().st_uid} | ({path.stat().st_uid} if path.exists() else set())
    strangers = owners - {uid, _ROOT} if path.is_symlink() or uid == _ROOT else owners - {uid}
    return f"{path} belongs to user {min(strangers)}" if strangers else None


def open_to_others(path: Path) -> str | None:
    """Return why others may write to a directory; a sticky one, such as /tmp, is safe."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    group = found.st_mode & stat.S_IWGRP and found.st_gid != _ROOT
    return f"other users may write to {path}" if group or found.st_mode & stat.S_IWOTH else None


def closed_to_others(path: Path) -> Path | None:
    """Return the first part of `path` that other users cannot enter or read, or None."""
    for part in (path, *path.parents):
        if not part.stat().st_mode & stat.S_IXOTH:
            return part
    return None if path.stat().st_mode & stat.S_IROTH else path


def refuse_if_changeable(settings: Path) -> None:
    """Check that only root and this user can change a settings file.

    Raises:
        BadConfiguration: another user can.
    """
    try:
        why = changeable(settings, os.geteuid())
    except OSError:
        return  # its reader reports the error
    if why is not None:
        raise BadConfiguration(
            f"cannot use the configuration {settings}: {why}",
            "the file must belong to root, or to you for a personal daemon, and no other user may "
            "write to it (chmod go-w)" + ("" if os.geteuid() else " or to a directory above it"),
        )


def make_directories(path: Path, mode: int) -> None:
    """Create the missing parts of `path`, each with exactly `mode`, independent of the umask."""
    if path.exists():
        return
    make_directories(path.parent, mode)
    path.mkdir(exist_ok=True)
    path.chmod(mode)
