"""Names in the settings that the user database does not know: told, since they may be mistyped.

No error: an account may come later, or from a directory that does not answer now.
"""

import grp
import logging
import pwd
from collections.abc import Callable
from threading import Thread

from gpulease.config import Settings

_log = logging.getLogger("gpuleased")


def unknown_names(settings: Settings) -> list[str]:
    """Return a sentence for each table of a user or a group that does not exist now."""
    return [
        f"[{table}.{name}] counts for nobody now: there is no such {what}"
        for table, what, names, find in (
            ("users", "user", settings.users, pwd.getpwnam),
            ("groups", "group", settings.groups, grp.getgrnam),
        )
        for name in names
        if not _is_known(name, find)
    ]


def _is_known(name: str, find: Callable[[str], object]) -> bool:
    try:
        find(name)
    except (KeyError, ValueError):
        return False
    return True


def warn_of_unknown_names(settings: Settings) -> None:
    """Say in the log which names nobody knows; a directory may take its time to answer."""
    if settings.users or settings.groups:
        Thread(target=_warn, args=(settings,), daemon=True, name="names").start()


def _warn(settings: Settings) -> None:
    for each in unknown_names(settings):
        _log.warning("the settings: %s", each)
