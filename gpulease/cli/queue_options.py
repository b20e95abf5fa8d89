"""What --begin and --after say, as a request writes it."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from gpulease.cli.job_selection import LAST, own_jobs
from gpulease.client import Client
from gpulease.errors import BadValue, NoSuchJob
from gpulease.units import parse_instant
from gpulease.wire.jobs import JobView

_CONDITION = re.compile(r"(?P<job>.+?)(?::(?P<condition>ok|fail|any))?", re.ASCII | re.DOTALL)
_JOB = re.compile(r"\d+(?:_\d+)?", re.ASCII)


def begin_instant(text: str, now: datetime) -> str:
    """Return the instant that --begin names, in ISO 8601. Raises what `parse_instant` raises."""
    return parse_instant(text, now).astimezone(UTC).isoformat()


def dependencies(client: Client, texts: Iterable[str]) -> list[str]:
    """Return the dependencies that --after names, with ids for `last` and for names.

    Raises:
        NoSuchJob: the caller has no job of this name.
    """
    words = [word for text in texts for word in text.split(",")]
    asked = [(word, found["job"], found["condition"] or "ok") for word in words
             if (found := _CONDITION.fullmatch(word))]  # fmt: skip
    if len(asked) < len(words):
        raise BadValue("cannot use --after: a job is missing", "such as --after 17:ok,18:any")
    needs_list = not all(_JOB.fullmatch(job) for _, job, _ in asked)
    own = own_jobs(client, ended=True) if needs_list else ()
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
