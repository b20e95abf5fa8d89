"""The events of jobs that users are notified of, and messages to the program that sends one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpulease.errors import BadValue

VARIABLE = "GPULEASE_NOTIFICATION"
"""Has a `NotificationOrder` as JSON, in the environment of the program."""
MODULE = "gpulease.notifications"
"""The program, which runs as the user."""
END = b"end"
"""The last line of what the program reports: all results are above."""
TIME_LEFT = "time-left"
DIGEST = "digest"
_ALL = ("start", "end", "fail", "oom", "over-lease", "idle", TIME_LEFT)
"""What `all` means."""
EVENTS_OF_JOBS = (*_ALL, DIGEST)
"""The events that a job can ask for."""
_MOST_EVENTS = 32
_TIME_LEFT_S = 600
_LONGEST_TIME_LEFT_S = 3650 * 24 * 3600
"""The longest time limit of a job."""
_MOST_DIGITS = 9


def notify_events(names: Sequence[str]) -> tuple[str, ...]:
    """Return the events of which the owner of a job is notified, each once and in their order.

    Raises:
        BadValue: there is no such event, or its span is out of range.
    """
    if len(names) > _MOST_EVENTS:
        raise BadValue(f"{len(names)} events are too many (the limit is {_MOST_EVENTS})")
    asked = [each for name in names for each in (_ALL if name == "all" else (name,))]
    # A span that is given replaces the default.
    named = dict(_event(each) for each in sorted(asked, key=len))
    listed = (name for name in EVENTS_OF_JOBS if name in named)
    return tuple(f"{name}={named[name]}" if named[name] else name for name in listed)


def _event(text: str) -> tuple[str, int | None]:
    name, equals, seconds = text.partition("=")
    if name not in EVENTS_OF_JOBS or (equals and name != TIME_LEFT):
        events = ", ".join(EVENTS_OF_JOBS)
        raise BadValue(f"no event named {text[:40]!r}", f"use some of {events}, all, or none")
    if name != TIME_LEFT:
        return name, None
    if equals and not (seconds.isascii() and seconds.isdecimal() and len(seconds) <= _MOST_DIGITS):
        raise BadValue(f"{seconds[:40]!r} is no number of seconds before the time limit")
    span = int(seconds or _TIME_LEFT_S)
    if not 1 <= span <= _LONGEST_TIME_LEFT_S:
        raise BadValue(f"the time left {span} is out of range (1 to {_LONGEST_TIME_LEFT_S})")
    return name, span


@dataclass(slots=True)
class NotificationOrder:
    """A message to send."""

    event: str
    title: str
    body: str
    within_s: float
    """For all receivers together, which get it at the same time."""
    job: int | None = None
    done: list[str] = field(default_factory=list)
    """The keys of the receivers that have it, from earlier attempts."""
    details: str = ""
    """Added to the body, unless the user's file has `details = false`: the command, the output."""
    link: str = ""
    """The job's page; empty if the daemon does not know the address of its web page."""
    failed: bool | None = None
    """Whether the job that has ended has failed; null for other messages."""
    verbose: bool = False
    """Report the output of commands and the log of Apprise, which may contain secrets."""


@dataclass(slots=True)
class ReceiverView:
    """What happened at one receiver; the program writes one for each, as a line of JSON."""

    name: str
    """Without secrets: "command", "url 1 (slack)"; empty if the file cannot be used."""
    key: str = ""
    """Identifies the receiver in later attempts."""
    error: str | None = None
    """Why it does not have the message, without secrets; null: it has."""
    hint: str | None = None
    is_final: bool = False
    """Another attempt would fail in the same way."""
    output: str = ""
    """With `verbose`: what the command or Apprise said."""
    quiet_until: datetime | None = None
    """When it is to be sent, by the quiet hours of the user's file; null: now."""


@dataclass(slots=True)
class NotifyTestView:
    """What happened to a test message at each receiver of the caller."""

    receivers: list[ReceiverView]
