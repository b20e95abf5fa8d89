"""The daemon on one of the usual sockets, if it listens there now: the everyday case.

`discovery` and `user_daemon` know what to do in the others.
"""

from __future__ import annotations

import os

from gpulease import locations
from gpulease.client.transport import Transport
from gpulease.client.unix_socket import answers, dial, trusted_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

_ANSWERS_WITHIN_S = 5.0


def listening(
    named: PathLike[str] | str | None, environment: Mapping[str, str]
) -> Transport | None:
    """Return the daemon of --socket (`named`) or GPULEASE_SOCKET, the machine's, or the user's own.

    The first is not asked whether it answers. None: no daemon listens, or more is to be checked.
    """
    if named:
        return Transport(os.fspath(named), None)
    if path := environment.get("GPULEASE_SOCKET"):
        # Another user may have set it (su, sudo -E).
        return Transport(path, trusted_users())
    try:
        dial(locations.SYSTEM_SOCKET, _ANSWERS_WITHIN_S).close()
    except FileNotFoundError:
        return _own(environment)
    except OSError:
        return None  # it restarts
    return Transport(locations.SYSTEM_SOCKET, trusted_users())


def _own(environment: Mapping[str, str]) -> Transport | None:
    """Return the user's own daemon, if the machine has none."""
    if os.path.isdir(os.path.dirname(locations.SYSTEM_SOCKET)):
        return None  # the machine's daemon restarts
    if "GPULEASE_SIMULATE" in environment:
        return None  # the user's daemon may simulate other GPUs than this, and a warning says so
    path = locations.personal_socket(environment)
    return Transport(path, trusted_users()) if answers(path) else None
