"""What the daemon and the program that sends a notification exchange, and the result of a test."""

from dataclasses import dataclass, field

VARIABLE = "GPULEASE_NOTIFICATION"
"""Has a `NotificationOrder` as JSON, in the environment of the program."""
MODULE = "gpulease.notify"
"""The program, which runs as the user."""


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
    verbose: bool = False
    """Report the output of commands and the log of Apprise, which may contain secrets."""


@dataclass(slots=True)
class ReceiverView:
    """What happened at one receiver; the program writes one for each, as a line of JSON."""

    name: str
    """Without secrets: "command", "mail", "url 1 (slack)"; empty if the file cannot be used."""
    key: str = ""
    """Identifies the receiver in later attempts."""
    error: str | None = None
    """Why it does not have the message, without secrets; null: it has."""
    hint: str | None = None
    is_final: bool = False
    """Another attempt would fail in the same way."""
    output: str = ""
    """With `verbose`: what the command, sendmail or Apprise said."""


@dataclass(slots=True)
class NotifyTestView:
    """What happened to a test message at each receiver of the caller."""

    receivers: list[ReceiverView]
