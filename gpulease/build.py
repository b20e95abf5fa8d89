"""Which build this is: the version, and what .ci/build_stamp.py put into the package."""

import os

from gpulease import __version__


def described() -> str:
    """Return the version with the commit and the date of the build."""
    # No pathlib and no importlib.metadata: scripts ask for the version often.
    stamp = os.path.join(os.path.dirname(__file__), "build.txt")  # noqa: PTH118, PTH120
    try:
        with open(stamp, encoding="utf-8") as file:  # noqa: PTH123
            built = file.read().strip()
    except OSError:
        built = "development"
    return f"{__version__} ({built})"
