"""The packages that only the daemon needs, and how the programs find theirs beside a PYTHONPATH.

The command and `gpulease.lease` work without them, so a training environment stays small.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

NEEDED = (
    "alembic",
    "apscheduler",
    "httptools",
    "jeepney",
    "psutil",
    "pynvml",
    "sqlalchemy",
    "uvicorn",
)
"""Names to import, of the distributions in the extra."""


LEAST_PYTHON = (3, 11)
"""Of all programs; gpulease.lease needs 3.10, which users' environments have."""


def install_hint(*extras: str) -> str:
    """Return what to do to install extras of gpulease here, for the hint of an error."""
    if sys.version_info < LEAST_PYTHON:
        return (
            "docs/admin/install.md has ways to a newer Python; gpulease.lease works with this one"
        )
    pip = Path(sys.prefix, "bin/pip")
    # uv makes environments without one.
    install = f"{pip} install" if pip.exists() else f"uv pip install --python {sys.executable}"
    return f"{install} 'gpulease[{','.join(extras)}]'"


INSTALL_HINT = install_hint("daemon")


def missing() -> tuple[str, ...]:
    """Return the packages that are not installed. Imports none of them."""
    return tuple(name for name in NEEDED if find_spec(name) is None)


def complaint(purpose: str) -> str | None:
    """Return why `purpose`, such as "start gpuleased", cannot be done; None if it can."""
    if (old := too_old(purpose)) is not None:
        return old
    names = missing()
    if not names:
        return None
    return f"cannot {purpose}: the packages of the daemon are not installed: {', '.join(names)}"


def too_old(purpose: str) -> str | None:
    """Return why `purpose` cannot be done with this Python; None if it can."""
    if sys.version_info >= LEAST_PYTHON:
        return None
    version = ".".join(map(str, sys.version_info[:2]))
    return f"cannot {purpose}: it needs Python 3.11 or later, and this is Python {version}"


def prefer_installed() -> None:
    """Search PYTHONPATH and the current directory last, after what is installed.

    They are meant for the user's jobs, and may hold packages for another Python. They are still
    searched: on clusters, environment modules provide packages by PYTHONPATH.
    """
    library = os.__file__.rpartition("/")[0]
    if library in sys.path:
        start = sys.path.index(library)
        sys.path = sys.path[start:] + sys.path[:start]


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which `python -P -m gpulease...` finds this gpulease first."""
    paths = str(Path(__file__).parents[1]), environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
