"""What --notify needs of the user's own file: the span of time-left, and a receiver."""

from collections.abc import Sequence

from gpulease.cli.caller import environment
from gpulease.cli.format import clean
from gpulease.cli.render import print_stderr
from gpulease.errors import BadConfiguration
from gpulease.notify.settings import NotifySettings, read_notify_settings
from gpulease.units import parse_span

_TIME_LEFT = "time-left"
_NO_RECEIVER = """\
gpulease: no notification will be sent: no receiver is configured

hint: [notify] in ~/.config/gpulease/config.toml, such as mail = "me@example.org"; then test it \
with gpulease notify --test"""


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


def _with_spans(events: Sequence[str], settings: NotifySettings) -> list[str]:
    usual = f"{_TIME_LEFT}={settings.time_left.total_seconds():.0f}"
    found = [_with_seconds(each, usual) for each in events]
    return [*found, usual] if "all" in found else found


def _with_seconds(event: str, usual: str) -> str:
    if event == _TIME_LEFT:
        return usual
    name, equals, span = event.partition("=")
    is_span = equals and name == _TIME_LEFT
    return f"{name}={parse_span(span).total_seconds():.0f}" if is_span else event
