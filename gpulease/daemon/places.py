"""Who may look into a directory, and who decides what a settings file says."""

import os
import stat
from pathlib import Path

from gpulease.errors import BadConfiguration
from gpulease.footing import changeable


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
