"""The table [notify] of a user's own file: the events to be notified of, and the receivers."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

from gpulease import config
from gpulease.errors import BadConfiguration, BadValue, GpuleaseError
from gpulease.setting_parsers import read_toml
from gpulease.units import next_time_of_day, parse_setting_span

_KEYS = ("events", "command", "urls", "time_left", "details", "quiet")
_QUIET = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", re.ASCII)
_ONCE_KNOWN = ("mail", "sendmail")
_MAIL_HINT = (
    'for mail, use urls = ["mailto://..."] as Apprise has them, or '
    """command = ["sh", "-c", 'mail -s "$GPULEASE_TITLE" me@example.org']"""
)
_MOST_URLS = 16


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """The receivers of a user, and the events of which all jobs notify them."""

    events: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """The command and its arguments."""
    urls: tuple[str, ...] = ()
    """As Apprise has them. They contain secrets."""
    time_left: timedelta = timedelta(minutes=10)
    """The rest of the time limit of which `time-left` notifies."""
    details: bool = True
    """Whether messages contain the command of a job and the end of its output."""
    quiet: tuple[time, time] | None = None
    """Between these times of the day messages wait, as from 22:00 to 7:00."""

    @property
    def has_receiver(self) -> bool:
        return bool(self.command or self.urls)

    def quiet_until(self, now: datetime) -> datetime | None:
        """Return when the quiet hours end, if it is quiet now; `now` is in the user's time zone."""
        if self.quiet is None:
            return None
        begin, end = self.quiet
        at = now.time()
        is_quiet = begin <= at < end if begin < end else at >= begin or at < end
        return next_time_of_day(end, now) if is_quiet else None


def read_notify_settings(environment: Mapping[str, str]) -> NotifySettings:
    """Return the table [notify] in the file of the user who runs this process.

    Raises:
        BadConfiguration: the file cannot be read, or has mistakes. The text has no secrets.
    """
    try:
        path = config.personal_config(environment)
        is_file = path is not None and path.is_file()
    except OSError as error:
        raise BadConfiguration(
            f"cannot read ~/.config/gpulease/config.toml: {error.strerror}"
        ) from None
    if path is None:
        return NotifySettings()
    if not is_file:  # a FIFO would never end
        raise BadConfiguration(f"cannot read {path}: it is not a regular file")
    table = read_toml(path).get(config.NOTIFY_TABLE, {})
    try:
        return _settings_of(table)
    except (ValueError, GpuleaseError) as error:
        hint = getattr(error, "hint", None) or "see docs/commands/notify.md for an example"
        raise BadConfiguration(
            f"cannot use [{config.NOTIFY_TABLE}] in {path}: {error}", hint
        ) from None


def _settings_of(table: Any) -> NotifySettings:
    if not isinstance(table, dict):
        raise ValueError("it is a table")
    if gone := [key for key in _ONCE_KNOWN if key in table]:
        raise BadValue(f"gpulease no longer sends mail itself, so {gone[0]} has no use", _MAIL_HINT)
    if unknown := [key for key in table if key not in _KEYS]:
        raise ValueError(f"it has an unknown key {unknown[0]!r}; known keys: {', '.join(_KEYS)}")
    line = table.get("command")
    # Words as a shell has them, but no shell runs them.
    command = shlex.split(line) if isinstance(line, str) else _texts(table, "command")
    if command:
        command = (str(Path(command[0]).expanduser()), *command[1:])
    urls = _texts(table, "urls")
    if len(urls) > _MOST_URLS:
        raise ValueError(f"urls has {len(urls)} entries, and the limit is {_MOST_URLS}")
    default = NotifySettings()
    time_left = table.get("time_left")
    if time_left is not None and not isinstance(time_left, str):
        raise ValueError("time_left is a text")
    details = table.get("details", default.details)
    if not isinstance(details, bool):
        raise ValueError("details is true or false")
    return NotifySettings(
        events=_texts(table, "events"),
        command=tuple(command),
        urls=urls,
        time_left=default.time_left if time_left is None else parse_setting_span(time_left),
        details=details,
        quiet=_quiet_hours(table.get("quiet")),
    )


def _quiet_hours(value: Any) -> tuple[time, time] | None:
    if value is None:
        return None
    found = _QUIET.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('quiet is a part of the day, such as "22:00-07:00"')
    begin, end = (time(int(found[at]), int(found[at + 1])) for at in (1, 3))
    if begin == end:
        raise ValueError("quiet begins and ends at the same time; leave it out for none")
    return begin, end


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(
        isinstance(each, str) and each and "\0" not in each for each in texts
    ):
        raise ValueError(f"{key} is a list of texts")
    return tuple(texts)
