"""Where sockets and files of gpulease are, as text: `config` has the same as paths.

The command imports this at every start, so it imports next to nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_SOCKET = "/run/gpulease/gpuleased.sock"
SYSTEM_CONFIG = "/etc/gpulease/config.toml"


def environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def runtime_directory(environment: Mapping[str, str] = os.environ) -> str:
    """Return the directory of this user's short-lived files: XDG_RUNTIME_DIR, or one in /tmp.

    XDG_RUNTIME_DIR must belong to the user: root may inherit that of another user from su(1).
    """
    given = environment.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given) and os.stat(given).st_uid == os.geteuid():
        return f"{given}/gpulease"
    return f"/tmp/gpulease-{os.geteuid()}"  # noqa: S108  the daemon checks its owner


def personal_socket(environment: Mapping[str, str] = os.environ) -> str:
    """Return the socket of this user's personal daemon."""
    return f"{runtime_directory(environment)}/gpuleased.sock"


def personal_config(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the settings file of this user's personal daemon, if there is one.

    Root reads only a file of root: it may inherit the environment of another user from su(1).

    Raises:
        OSError: it cannot be looked up.
    """
    home = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if home.startswith("~"):  # this user has no home
        return None
    file = f"{home}/gpulease/config.toml"
    try:
        found = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if os.geteuid() == 0 and found.st_uid != 0 else file
