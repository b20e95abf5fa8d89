"""Whose ground a path stands on: whether somebody else could put their own thing in its place.

A daemon of root opens by name what it keeps: whoever may rename a part of the way there, or has
laid it beforehand, would decide what root reads, writes and runs.

Who may look into a directory, and who decides what a settings file says.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulease.errors import BadConfiguration

_ROOT = 0
_MOST_LINKS = 40
"""As many as the kernel follows in one lookup."""


def shaky(path: Path, uid: int) -> str | None:
    """Return why `path` is not for `uid` to use, as a sentence; None if nobody else has a say.

    For root all of the way there counts. Others have homes and shared folders as they are, and only
    the last part has to be theirs. What is not there yet can be made by who may write its folder.
    """
    if uid != _ROOT:
        return _wrong_owner(path, uid) if os.path.lexists(path) else None
    for part in _passed(path):
        if os.path.lexists(part) and (why := _wrong_owner(part, uid) or _open_to_others(part)):
            return why
    return None


def changeable(path: Path, uid: int) -> str | None:
    """Return why others than `uid` and root decide what a file says; None if they do not.

    For root all of the way there counts, as for `shaky`; for others what the file itself allows.
    """
    if uid == _ROOT:
        return shaky(path, uid)
    found = path.stat()
    if found.st_uid not in (uid, _ROOT):
        return f"{path} belongs to user {found.st_uid}"
    return f"everybody may write to {path}" if found.st_mode & stat.S_IWOTH else None


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
            # The first part of an absolute target is "/", and so the lookup begins anew.
            ahead += reversed(step.readlink().parts)
        else:
            here = step


def _wrong_owner(path: Path, uid: int) -> str | None:
    """Look at a link as well as at what it leads to: who made it can lead it elsewhere."""
    owners = {path.lstat().st_uid} | ({path.stat().st_uid} if path.exists() else set())
    strangers = owners - {uid, _ROOT} if path.is_symlink() or uid == _ROOT else owners - {uid}
    return f"{path} belongs to user {min(strangers)}" if strangers else None


def _open_to_others(path: Path) -> str | None:
    """Return that others may write a folder; one where each keeps to their own (/tmp) is sound."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    group = found.st_mode & stat.S_IWGRP and found.st_gid != _ROOT
    return (
        f"others than root may write to {path}" if group or found.st_mode & stat.S_IWOTH else None
    )


def closed_to_others(path: Path) -> Path | None:
    """Return the part of `path` that other users cannot pass or read, or None."""
    for part in (path, *path.parents):
        if not part.stat().st_mode & stat.S_IXOTH:
            return part
    return None if path.stat().st_mode & stat.S_IROTH else path


def refuse_if_changeable(settings: Path) -> None:
    """Check that nobody but root and this user can change a settings file.

    Raises:
        BadConfiguration: somebody can.
    """
    try:
        why = changeable(settings, os.geteuid())
    except OSError:
        return  # what is wrong with it is said by its reader
    if why is not None:
        raise BadConfiguration(
            f"cannot use the configuration {settings}: {why}",
            "the settings decide what the daemon does: the file must belong to root, or to you for "
            "a daemon of your own, and nobody else may write it (chmod go-w)"
            + ("" if os.geteuid() else ", nor any directory above it"),
        )


def make_directories(path: Path, mode: int) -> None:
    """Make what is missing of `path`, each part with exactly `mode`, whatever the umask is."""
    if path.exists():
        return
    make_directories(path.parent, mode)
    path.mkdir(exist_ok=True)
    path.chmod(mode)
