"""The packages that only the daemon needs, and how to install an extra such as `daemon`.

The command and `gpulease.lease` work without them, so a training environment stays small.
"""

from importlib.util import find_spec

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


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return what to do to install extras of gpulease, for the hint of an error."""
    return f"in a clone of gpulease: {pip} install '.[{','.join(extras)}]'"


INSTALL_HINT = install_hint("daemon")


def missing() -> tuple[str, ...]:
    """Return the packages that are not installed. Imports none of them."""
    return tuple(name for name in NEEDED if find_spec(name) is None)


def complaint(purpose: str) -> str | None:
    """Return why `purpose`, such as "start gpuleased", cannot be done; None if it can."""
    names = missing()
    if not names:
        return None
    return f"cannot {purpose}: the packages of the daemon are not installed: {', '.join(names)}"
