"""Words and times as every verb writes them: pure functions, with the time as an argument."""

import unicodedata
from datetime import datetime, timedelta

from gpulease.units import format_size, format_span
from gpulease.wire import JobView

UNKNOWN = "-"


def clean(text: str) -> str:
    """Return one line without anything that would steer a terminal: it may be a stranger's."""
    return "".join(char if char.isprintable() else "?" for char in text)


def sentence(reason: str, hint: str | None = None) -> str:
    """Return why something is as it is, with the hint to it, on one line."""
    return clean(f"{reason}; hint: {hint}" if hint else reason)


def cells(text: str) -> int:
    """Return how many columns `text` takes on a terminal."""
    return sum(_cells(char) for char in text)


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with an ellipsis where something was cut."""
    if cells(text) <= width:
        return text
    kept, room = [], width - 1
    for char in text:
        room -= _cells(char)
        if room < 0:
            break
        kept.append(char)
    return "".join(kept).rstrip() + "…" if width > 0 else ""


def size(amount: int | None) -> str:
    """Write bytes, or that they are not known."""
    return UNKNOWN if amount is None else format_size(amount)


def instant(written: str) -> datetime:
    """Read an instant of the wire."""
    return datetime.fromisoformat(written)


def clock(written: str | None, now: datetime) -> str:
    """Write an instant as a wall clock shows it in the time zone of `now`."""
    if written is None:
        return UNKNOWN
    local = instant(written).astimezone(now.tzinfo)
    if local.date() == now.date():
        return f"{local:%H:%M}"
    if abs(local - now) < timedelta(days=6):
        return f"{local:%a %H:%M}"
    return f"{local:%Y-%m-%d %H:%M}"


def until(written: str | None, now: datetime) -> str:
    """Write how long it is from `now` to an instant."""
    return UNKNOWN if written is None else format_span(instant(written) - now)


def between(start: str | None, end: str | None, now: datetime) -> str:
    """Write how long something took, or has taken up to `now`."""
    if start is None:
        return UNKNOWN
    return format_span((instant(end) if end else now) - instant(start))


def ordinal(number: int) -> str:
    """Write a place in a line: 1st, 2nd, 3rd, 4th, 11th."""
    teens = 10 < number % 100 < 20
    ending = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def asks(job: JobView) -> str:
    """Write what a job asked for: 4G, 2 x 40%, all of a GPU."""
    claim = job.claim
    amount = f"{claim.share:g}%" if claim.share is not None else size(claim.memory)
    times = f"{claim.gpus} x {amount}" if claim.gpus > 1 else amount
    return f"{times} alone" if claim.exclusive else times


def label(job: JobView) -> str:
    """Write a job's name, and its state or how it ended."""
    return job.state if job.state != "ended" else (job.outcome or "ended").replace("_", " ")
