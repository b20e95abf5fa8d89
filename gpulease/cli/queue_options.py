"""What --begin and --after say, as a request writes it."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, time, timedelta

from gpulease.cli.job_selection import LAST, own_name
from gpulease.client import Client
from gpulease.errors import BadValue, GpuleaseError, NoSuchJob
from gpulease.units import parse_span
from gpulease.wire.views import JobView

_CONDITION = re.compile(r"(?P<job>.+?)(?::(?P<condition>ok|fail|any))?", re.ASCII | re.DOTALL)
_JOB = re.compile(r"\d+(?:_\d+)?", re.ASCII)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)


def begin_instant(text: str, now: datetime) -> str:
    """Return the instant that --begin names, in ISO 8601: 22:00, +2h, or an instant.

    A time of day is the next one in the caller's time zone.

    Args:
        text: what was typed.
        now: the time, with the caller's time zone.

    Raises:
        BadValue: it is none of these.
    """
    try:
        if text.startswith("+"):
            at = now + parse_span(text[1:])
        elif _CLOCK.fullmatch(text):
            at = _next(time.fromisoformat(text.rjust(len(text) + (text[1] == ":"), "0")), now)
        else:
            at = datetime.fromisoformat(text)
        return at.astimezone(UTC).isoformat()
    except (ValueError, OverflowError, GpuleaseError):
        raise BadValue(
            f"cannot use --begin {text[:40]}: it is not a time",
            "write 22:00, +2h, or an instant such as 2027-01-31T08:00",
        ) from None


def _next(wanted: time, now: datetime) -> datetime:
    """Return the next time of day; without a zone, which means that of this machine."""
    here = now.replace(tzinfo=None)
    at = datetime.combine(here.date(), wanted)
    return at if at > here else at + timedelta(days=1)


def dependencies(client: Client, texts: Iterable[str]) -> list[str]:
    """Return the dependencies that --after names, with ids for `last` and for names.

    Raises:
        NoSuchJob: the caller has no job of this name.
    """
    words = [word for text in texts for word in text.split(",")]
    asked = [(word, found["job"], found["condition"] or "ok") for word in words
             if (found := _CONDITION.fullmatch(word))]  # fmt: skip
    if len(asked) < len(words):
        raise BadValue("cannot use --after: a job is missing", "such as --after 17,18:any")
    needs_list = not all(_JOB.fullmatch(job) for _, job, _ in asked)
    own = client.jobs(everything=True, user=own_name()).jobs if needs_list else ()
    return [f"{_id(own, job)}:{condition}" for _, job, condition in asked]


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
