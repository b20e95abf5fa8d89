"""Options that need more than the line: --begin a clock, --after jobs, --notify a file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from gpulease.cli.job_selection import LAST, own_jobs
from gpulease.cli.render import print_stderr
from gpulease.client.light_client import LightClient
from gpulease.config import NOTIFY_TABLE, personal_config
from gpulease.drawing.words import clean
from gpulease.errors import BadConfiguration, BadValue, NoSuchJob
from gpulease.locations import environment
from gpulease.notifications.settings import NotifySettings, read_notify_settings
from gpulease.options import listed_events
from gpulease.units import parse_instant, parse_span
from gpulease.wire.jobs import JobView
from gpulease.wire.notifications import TIME_LEFT, notify_events

_CONDITION = re.compile(r"(?P<job>.+?)(?::(?P<condition>ok|fail|any))?", re.ASCII | re.DOTALL)
_JOB = re.compile(r"\d+(?:_\d+)?", re.ASCII)


def begin_instant(text: str, now: datetime) -> str:
    """Return the instant that --begin names, in ISO 8601. Raises what `parse_instant` raises."""
    return parse_instant(text, now).astimezone(UTC).isoformat()


def dependencies(client: LightClient, texts: Iterable[str]) -> list[str]:
    """Return the dependencies that --after names, with ids for `last` and for names.

    Raises:
        NoSuchJob: the caller has no job of this name.
    """
    asked = conditions(texts)
    needs_list = not all(_JOB.fullmatch(job) for job, _ in asked)
    own = own_jobs(client, ended=True) if needs_list else ()
    return [f"{_id(own, job)}:{condition}" for job, condition in asked]


def conditions(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return the jobs that --after names, and how each has to end: ok, fail or any.

    Raises:
        BadValue: a job is missing.
    """
    words = [word for text in texts for word in text.split(",")]
    found = [each for word in words if (each := _CONDITION.fullmatch(word))]
    if len(found) < len(words):
        raise BadValue("cannot use --after: a job is missing", "such as --after 17:ok,18:any")
    return [(each["job"], each["condition"] or "ok") for each in found]


def _id(own: Sequence[JobView], word: str) -> str:
    if _JOB.fullmatch(word):
        return word
    named = [job for job in own if word in (LAST, job.name)]
    if not named:
        raise NoSuchJob(
            f"cannot wait for {word[:80]!r}: no job of yours has this name",
            "gpulease list --all shows all jobs; a job of another user is named by its number",
        )
    newest = named[-1]
    # The jobs of an array have one name.
    array = newest.queue and newest.queue.array
    return str(newest.id if array is None else array)


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
