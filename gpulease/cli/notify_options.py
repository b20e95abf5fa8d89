"""What --notify needs of the user's own file: the span of time-left, a receiver; and a check."""

from collections.abc import Mapping, Sequence

from gpulease.cli.caller import environment
from gpulease.cli.render import print_stderr
from gpulease.config import NOTIFY_TABLE, personal_config
from gpulease.drawing.words import clean
from gpulease.errors import BadConfiguration, BadValue
from gpulease.notifications.settings import NotifySettings, read_notify_settings
from gpulease.options import listed_events
from gpulease.units import parse_span
from gpulease.wire.notifications import TIME_LEFT, notify_events

_NO_RECEIVER = """\
gpulease: no notification will be sent: no receiver is configured

hint: [notify] in ~/.config/gpulease/config.toml, such as urls = ["ntfy://my-topic"]; then test \
it with gpulease notify --test"""


def completed(events: Sequence[str]) -> list[str]:
    """Return the events with the span of time-left; warn if nothing would be sent.

    Raises:
        BadValue: the span cannot be read.
    """
    try:
        settings = read_notify_settings(environment())
    except BadConfiguration as error:
        print_stderr(f"gpulease: no notification will be sent: {clean(error.message)}")
        return _with_spans(events, NotifySettings())
    if not settings.has_receiver:
        print_stderr(_NO_RECEIVER)
    return _with_spans(events, settings)


def checked_settings(variables: Mapping[str, str]) -> NotifySettings:
    """Return [notify] of the user's file, of which `gpulease run` can use all.

    Raises:
        BadConfiguration: the file cannot be read, or has mistakes.
    """
    settings = read_notify_settings(variables)
    try:
        notify_events(_with_spans([*listed_events(settings.events), TIME_LEFT], settings))
    except BadValue as error:
        what = f"[{NOTIFY_TABLE}] in {personal_config(variables)}"
        raise BadConfiguration(f"cannot use {what}: {error.message}", error.hint) from None
    return settings


def _with_spans(events: Sequence[str], settings: NotifySettings) -> list[str]:
    usual = f"{TIME_LEFT}={settings.time_left.total_seconds():.0f}"
    found = []
    for event in events:
        name, equals, span = event.partition("=")
        if name != TIME_LEFT:
            found.append(event)
        else:
            found.append(f"{name}={parse_span(span).total_seconds():.0f}" if equals else usual)
    return [*found, usual] if "all" in found else found
