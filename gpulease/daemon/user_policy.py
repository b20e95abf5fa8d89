"""The settings for one user's jobs: of the user's table, of the groups', or the general ones.

Unknown names of users and groups cause warnings only: an account may be created later, or come from
a directory that is unavailable now.
"""

import grp
import logging
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from typing import Any

from gpulease.call_thread import CallThread
from gpulease.config import FORMER_QUEUE_KEYS, PER_USER, TOGETHER, Settings
from gpulease.domain.idle import IdlePolicy, Release
from gpulease.domain.job import Owner, UsageBy, UsageTotal
from gpulease.domain.limits import Beyond, GroupLimits, UserLimits
from gpulease.domain.overuse import Consequence, OverusePolicy


class UserPolicy:
    """The policies of users under the present settings."""

    def __init__(self, settings: Settings) -> None:
        self.adopt(settings)

    def adopt(self, settings: Settings) -> None:
        """Use new settings, and look up the groups of users again."""
        self._settings = settings
        self._of: dict[int, Mapping[str, Any]] = {}

    @property
    def stops_overuse(self) -> bool:
        """Whether jobs that stay over their leases are stopped, unless a table differs."""
        return self._settings.overuse == Consequence.STOP

    @property
    def differ_on_overuse(self) -> bool:
        """Whether a table has another setting for overuse."""
        tables = (*self._settings.users.values(), *self._settings.groups.values())
        return any(
            each.get("overuse", self._settings.overuse) != self._settings.overuse for each in tables
        )

    def overuse(self, owner: Owner) -> OverusePolicy:
        """Return the policy for a user's jobs that are over their leases."""
        found = self._found(owner)
        return OverusePolicy(
            Consequence(found["overuse"]),
            found["overuse_tolerance"],
            found["overuse_grace"],
            found["elastic"],
        )

    def idleness(self, owner: Owner) -> IdlePolicy:
        """Return the policy for a user's leases that are not used."""
        found = self._found(owner)
        return IdlePolicy(Release(found["idle"]), found["idle_after"], found["idle_grace"])

    def limits(self, owner: Owner) -> UserLimits:
        """Return what a user may have at once, use in a week, and ask for."""
        known = self._found(owner)
        found = {each.name: known[each.name] for each in fields(UserLimits)}
        return UserLimits(**{**found, "over_limit": Beyond(found["over_limit"])})

    def _found(self, owner: Owner) -> Mapping[str, Any]:
        if owner.uid not in self._of:
            general = {key: getattr(self._settings, key) for key in PER_USER} | {"groups": ()}
            self._of[owner.uid] = {
                **general,
                **self._of_groups(owner),
                **self._settings.users.get(owner.user, {}),
            }
        return self._of[owner.uid]

    def _of_groups(self, owner: Owner) -> Mapping[str, Any]:
        """Return the settings of the user's groups; per key, the first table in the file wins.

        What members have together counts for each of the groups.
        """
        if not self._settings.groups:
            return {}
        names = groups_of(owner)
        found: dict[str, Any] = {}
        together = []
        for name, given in self._settings.groups.items():
            if name in names:
                found = {**given, **found}
                if any(each is not None for each in given.get(TOGETHER, {}).values()):
                    together.append(GroupLimits(name, UserLimits(**given[TOGETHER])))
        return {**found, "groups": tuple(together)}


def groups_of(owner: Owner) -> set[str]:
    """Return the names of a user's groups, from the user database."""
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


TotalsOf = Callable[[UsageBy, str | None, datetime | None, datetime], Sequence[UsageTotal]]


def with_names_of_groups(totals: TotalsOf) -> TotalsOf:
    """Return a function that names groups as the user database does."""

    def named(
        by: UsageBy, user: str | None, since: datetime | None, now: datetime
    ) -> Sequence[UsageTotal]:
        found = totals(by, user, since, now)
        if by is not UsageBy.GROUP:
            return found
        return [replace(each, key=_name_of_group(each.key)) for each in found]

    return named


def _name_of_group(gid: str) -> str:
    try:
        return grp.getgrgid(int(gid)).gr_name
    except (KeyError, OSError):
        return gid


_log = logging.getLogger(__name__)


def without_effect(settings: Settings) -> list[str]:
    """Return a warning for each former key, and for each user or group that does not exist now."""
    tables = (
        ("users", "user", settings.users, pwd.getpwnam),
        ("groups", "group", settings.groups, grp.getgrnam),
    )
    former = [
        f"[queue] {key} has no effect any more: remove it"
        for key in settings.queue
        if key in FORMER_QUEUE_KEYS
    ]
    admins = [
        f"[notify] admins: no such user: {name}"
        for name in settings.notify.get("admins", ())
        if not _is_known(name, pwd.getpwnam)
    ]
    return (
        former
        + admins
        + [
            f"[{table}.{name}] has no effect: no such {what}"
            for table, what, names, find in tables
            for name in names
            if not _is_known(name, find)
        ]
    )


def _is_known(name: str, find: Callable[[str], object]) -> bool:
    try:
        find(name)
    except (KeyError, ValueError):
        return False
    return True


def warn_of_what_has_no_effect(settings: Settings) -> None:
    """Log settings without effect; in a thread, since a directory may answer slowly."""
    if settings.users or settings.groups or FORMER_QUEUE_KEYS & settings.queue.keys():
        thread: CallThread[None] = CallThread("names")
        thread.enqueue(partial(_warn, settings))
        thread.close()


def _warn(settings: Settings) -> None:
    for each in without_effect(settings):
        _log.warning("the settings: %s", each)
