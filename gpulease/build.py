"""The version, with the commit and date that .ci/build_stamp.py puts into a package."""

import os

from gpulease import __version__


def described() -> str:
    """Return the version with the commit and date of the build."""
    # Without pathlib and importlib.metadata: scripts call --version often.
    stamp = os.path.join(os.path.dirname(__file__), "build.txt")  # noqa: PTH118, PTH120
    try:
        with open(stamp, encoding="utf-8") as file:  # noqa: PTH123
            built = file.read().strip()
    except OSError:
        built = "development"
    return f"{__version__} ({built})"
