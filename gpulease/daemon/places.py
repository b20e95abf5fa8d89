"""Who may look into a directory."""

import stat
from pathlib import Path


def closed_to_others(path: Path) -> Path | None:
    """Return the part of `path` that other users cannot pass or read, or None."""
    for part in (path, *path.parents):
        if not part.stat().st_mode & stat.S_IXOTH:
            return part
    return None if path.stat().st_mode & stat.S_IROTH else path
