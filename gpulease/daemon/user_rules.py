"""Device rules for what users start outside of jobs: the drop-ins, and their text.

A job's scope denies it the GPUs of others. A user can start a process elsewhere from within a job:
in their own systemd instance, in a login session, by cron or at. These rules deny GPUs there.
"""

from collections.abc import Mapping
from pathlib import Path

NAME = "50-gpulease.conf"
_RESTRICTED = {
    # Of every user: their sessions, and their own systemd instance.
    "user-.slice": "Slice",
    # These start programs of users within their own unit. Some distributions say crond.
    "cron.service": "Service",
    "crond.service": "Service",
    "atd.service": "Service",
}
_ROOT = "user-0.slice"
_EXCEPTED = "# Root may open every device. This file replaces the one for all users.\n"


def drop_ins(units: Path, template: str) -> Mapping[Path, str]:
    """Return the text of each drop-in by its path below `units`."""
    rules = {
        units / f"{unit}.d" / NAME: template.replace("[SECTION]", f"[{section}]")
        for unit, section in _RESTRICTED.items()
    }
    return {**rules, units / f"{_ROOT}.d" / NAME: _EXCEPTED}
