"""The settings of this process that its jobs inherit, besides directory and environment."""

import os
import resource


def umask() -> int:
    """Return the file mode creation mask."""
    # No system call reads the mask without setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def soft_limits() -> dict[str, int]:
    """Return the soft resource limits by the names of resource.RLIMIT_*; -1 is unlimited."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name))[0] for name in names}
