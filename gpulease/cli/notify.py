"""`gpulease notify`: show the receivers of notifications, and send them a test."""

from collections.abc import Iterator

import typer

from gpulease.cli.connect import reach_or_start
from gpulease.cli.options import SocketOption, named_socket, takes_its_options
from gpulease.cli.render import print_stderr, print_stdout
from gpulease.cli.resolved_options import checked_settings
from gpulease.client import encode
from gpulease.drawing.words import clean, sentence
from gpulease.errors import EXIT_OWN_FAILURE
from gpulease.light_json import indent
from gpulease.locations import environment
from gpulease.notifications.receivers import receivers_of
from gpulease.notifications.settings import NotifySettings
from gpulease.units import format_span
from gpulease.wire.notifications import NotifyTestView

_EXAMPLE = """\
no receiver is configured

hint: write this into ~/.config/gpulease/config.toml, with one or more of the receivers:

  [notify]
  events = ["fail", "oom"]                 # of all jobs, without --notify
  command = "~/bin/notify"                 # reads the message from its standard input
  urls = ["slack://...", "mailto://..."]   # see https://appriseit.com/services"""


@takes_its_options
def notify(ctx: typer.Context, *, is_test: bool, as_json: bool, socket: SocketOption = None) -> int:
    """Show where notifications of your jobs are sent, or send a test message there.

    gpulease run --notify asks for notifications of a job; the receivers are in
    [notify] of ~/.config/gpulease/config.toml. They are sent as you: the daemon
    does not read the file.

    \b
    Examples:
      gpulease notify --test
      gpulease run --mem 4G --notify fail,oom train.py

    \b
    Exit code: 0, or
      125  a receiver did not get the test message, or gpulease failed
    """
    settings = checked_settings(environment())
    if not is_test:
        print_stdout(indent(_as_json(settings)) if as_json else "\n".join(_described(settings)))
        return 0
    client, _ = reach_or_start(named_socket(ctx, socket), "notify")
    sent = client.test_notification()
    if as_json:
        print_stdout(indent(encode(sent)).rstrip())
    else:
        _print(sent)
    return EXIT_OWN_FAILURE if any(each.error for each in sent.receivers) else 0


def _described(settings: NotifySettings) -> Iterator[str]:
    if not settings.has_receiver:
        yield _EXAMPLE
        return
    yield f"receivers: {', '.join(each.name for each in receivers_of(settings))}"
    yield f"events of all jobs: {', '.join(settings.events) or 'none'}"
    yield f"time-left: {format_span(settings.time_left)} before the time limit"
    if settings.quiet is not None:
        yield "quiet: from {:%H:%M} to {:%H:%M}".format(*settings.quiet)


def _as_json(settings: NotifySettings) -> bytes:
    """Return the table [notify] without secrets: receivers are named, as in a test."""
    quiet = settings.quiet and "{:%H:%M}-{:%H:%M}".format(*settings.quiet)
    receivers = [{"name": each.name} for each in receivers_of(settings)]
    return encode({
        "receivers": receivers, "events": settings.events, "quiet": quiet,
        "time_left": settings.time_left.total_seconds(), "details": settings.details,
    })  # fmt: skip


def _print(sent: NotifyTestView) -> None:
    for each in sent.receivers:
        if each.error is None:
            print_stdout(f"{clean(each.name)}: sent")
        else:
            name = f"{clean(each.name)}: " if each.name else ""
            print_stderr(f"gpulease: {name}{sentence(each.error, each.hint)}")
        for line in each.output.splitlines():
            print_stderr(f"  {clean(line)}")
