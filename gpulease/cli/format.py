"""Words and times as every verb writes them: pure functions, with the time as an argument."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from gpulease.units import format_size, format_span
from gpulease.wire.requests import spoken
from gpulease.wire.views import EnforcementLevelView, GpuView, JobView, LeaseView, RefusalView

UNKNOWN = "-"


def clean(text: str) -> str:
    """Return one line without anything that would steer a terminal: it may be a stranger's."""
    return "".join(char if char.isprintable() else "?" for char in text)


def sentence(reason: str, hint: str | None = None) -> str:
    """Return why something is as it is, with the hint to it, on one line."""
    return clean(f"{reason}; hint: {hint}" if hint else reason)


def display_width(text: str) -> int:
    """Return how many columns `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    # rich has the tables of wide and combining characters.
    from rich.cells import cell_len

    return cell_len(text)


def truncate(text: str, width: int) -> str:
    """Return as much of the beginning of `text` as takes at most `width` columns."""
    if text.isascii() or width <= 0:
        return text[: max(0, width)]
    from rich.cells import chop_cells

    return chop_cells(text[: 4 * width], width)[0]


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with an ellipsis where something was cut."""
    if display_width(text) <= width:
        return text
    return truncate(text, width - 1).rstrip() + "…" if width > 0 else ""


def size(amount: int | None) -> str:
    """Write bytes, or that they are not known."""
    return UNKNOWN if amount is None else format_size(amount)


def instant(written: str) -> datetime:
    """Read an instant of the wire."""
    return datetime.fromisoformat(written)


def index_of(gpu: GpuView | RefusalView) -> str:
    """Return the index of a GPU as people say it; a MIG device has its place after it: 0:1."""
    return clean(gpu.label) or str(gpu.index)


def clock(written: str | None, now: datetime, *, seconds: bool = False) -> str:
    """Write an instant as a wall clock shows it in the time zone of `now`."""
    if written is None:
        return UNKNOWN
    local = instant(written).astimezone(now.tzinfo)
    time = f"{local:%H:%M:%S}" if seconds else f"{local:%H:%M}"
    if local.date() == now.date():
        return time
    if abs(local - now) < timedelta(days=6):
        return f"{local:%a} {time}"
    return f"{local:%Y-%m-%d} {time}"


def until(written: str | None, now: datetime) -> str:
    """Write how long it is from `now` to an instant."""
    return UNKNOWN if written is None else _span(instant(written) - now)


def between(start: str | None, end: str | None, now: datetime) -> str:
    """Write how long something took, or has taken up to `now`."""
    if start is None:
        return UNKNOWN
    return _span((instant(end) if end else now) - instant(start))


def since(written: str, now: datetime) -> str:
    """Write how long ago an instant was."""
    return _span(now - instant(written))


def ordinal(number: int) -> str:
    """Write a place in a line: 1st, 2nd, 3rd, 4th, 11th."""
    teens = 10 < number % 100 < 20
    ending = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


SUSPENDED = "suspended"
"""What an active job is called whose main process is stopped."""


def asks(job: JobView) -> str:
    """Write what a job asked for: 4G, 2 x 40%, all of a GPU."""
    claim = job.claim
    amount = f"{claim.share:g}%" if claim.share is not None else size(claim.memory)
    times = f"{claim.gpus} x {amount}" if claim.gpus > 1 else amount
    return f"{times} alone" if claim.exclusive else times


def named(job: JobView) -> str:
    """Write a job's name, and that it is a lease without a job if it is one."""
    name = clean(job.name)
    if job.kind != "hold":
        return name
    return "(hold)" if name == "hold" else f"{name} (hold)"


def label(job: JobView) -> str:
    """Write a job's state, or how it ended."""
    if job.suspended:
        return SUSPENDED
    return job.state if job.state != "ended" else spoken(job.outcome or "ended")


def is_above(job: JobView, lease: LeaseView) -> bool:
    """Tell whether a job uses more than it leased and nothing comes of that at this moment.

    It is within the tolerance, or nobody waits for the memory where leases are elastic.
    """
    above = lease.used is not None and lease.used > lease.memory
    return above and lease.over_since_at is None and job.state == "active"


def held_by(rungs: Sequence[EnforcementLevelView]) -> str:
    """Say in a line what holds jobs to their leases on a machine, and what does not."""
    has = ", ".join(_rung(each) for each in rungs if each.available)
    lacks = ", ".join(_rung(each) for each in rungs if not each.available)
    said = f"held by: {has or 'nothing, jobs are placed and counted only'}"
    return f"{said}; not by: {lacks} (gpulease doctor says why)" if lacks else said


def _rung(rung: EnforcementLevelView) -> str:
    return clean(rung.rung) + (" (not for everybody alike)" if rung.varies else "")


def _span(span: timedelta) -> str:
    """Write a span; none is below zero, whatever a clock that was set makes of it."""
    return format_span(max(span, timedelta(0)))
