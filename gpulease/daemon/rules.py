"""What the settings say about the jobs of one user: their own table, their groups', or for all."""

import grp
import os
import pwd
from collections.abc import Mapping
from typing import Any

from gpulease.config import PER_USER, Settings
from gpulease.domain.idleness import IdlePolicy, Release
from gpulease.domain.job import Owner
from gpulease.domain.overuse import Consequence, OverusePolicy


class Rules:
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
