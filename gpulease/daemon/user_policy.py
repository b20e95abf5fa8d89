"""What the settings say about the jobs of one user: their own table, their groups', or for all.

Names in the settings that the user database does not know: told, since they may be mistyped.

No error: an account may come later, or from a directory that does not answer now.
"""

import grp
import logging
import os
import pwd
from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

from gpulease.config import PER_USER, Settings
from gpulease.domain.idle import IdlePolicy, Release
from gpulease.domain.job import Owner
from gpulease.domain.overuse import Consequence, OverusePolicy


class UserPolicy:
    """The policies of users, as the settings are now."""

    def __init__(self, settings: Settings) -> None:
        self.adopt(settings)

    def adopt(self, settings: Settings) -> None:
        """Follow other settings; who is in which group is looked up anew."""
        self._settings = settings
        self._of: dict[int, Mapping[str, Any]] = {}

    @property
    def stops_overuse(self) -> bool:
        """Whether jobs are stopped that stay over their leases, unless a table says otherwise."""
        return self._settings.overuse == Consequence.STOP

    @property
    def differ_on_overuse(self) -> bool:
        """Whether a table says otherwise for somebody."""
        tables = (*self._settings.users.values(), *self._settings.groups.values())
        return any(
            each.get("overuse", self._settings.overuse) != self._settings.overuse for each in tables
        )

    def overuse(self, owner: Owner) -> OverusePolicy:
        """Return what holds for a job that is over its lease."""
        found = self._found(owner)
        return OverusePolicy(
            Consequence(found["overuse"]),
            found["overuse_tolerance"],
            found["overuse_grace"],
            found["elastic"],
        )

    def idleness(self, owner: Owner) -> IdlePolicy:
        """Return what holds for a lease that is not used."""
        found = self._found(owner)
        return IdlePolicy(Release(found["idle"]), found["idle_after"], found["idle_grace"])

    def _found(self, owner: Owner) -> Mapping[str, Any]:
        if owner.uid not in self._of:
            general = {key: getattr(self._settings, key) for key in PER_USER}
            self._of[owner.uid] = {
                **general,
                **self._of_groups(owner),
                **self._settings.users.get(owner.user, {}),
            }
        return self._of[owner.uid]

    def _of_groups(self, owner: Owner) -> Mapping[str, Any]:
        """Return what holds for the user's groups: for each key, the first in the file counts."""
        if not self._settings.groups:
            return {}
        names = groups_of(owner)
        found: dict[str, Any] = {}
        for name, given in self._settings.groups.items():
            if name in names:
                found = {**given, **found}
        return found


def groups_of(owner: Owner) -> set[str]:
    """Return the names of a user's groups, as the user database has them."""
    try:
        gids = {*os.getgrouplist(pwd.getpwuid(owner.uid).pw_name, owner.gid), owner.gid}
    except (KeyError, OSError):
        gids = {owner.gid}
    names = set()
    for gid in gids:
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names


_log = logging.getLogger(__name__)


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
