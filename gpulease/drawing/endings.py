"""How a job ended, what it needed and did, and what its owner may type about it. Pure."""

from __future__ import annotations

from datetime import timedelta

from gpulease.drawing.words import amount, id_of, instant, label, sentence, size
from gpulease.units import format_span
from gpulease.wire.text import leased, most_of, spoken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from gpulease.wire.jobs import EventView, JobView

_SIGNALED = 128
_OUTCOMES = frozenset({"time_limit", "over_lease", "gave_up", "dependency_failed", "launch_failed"})
"""Those that people read with a hyphen."""
_MUCH_LESS = 50
"""Percent of a lease."""
_BRIEF = timedelta(seconds=30)
"""After a shorter run the daemon advises no size: it may have missed the peak."""
_GIB = 1 << 30
_SHORT_HISTORY = timedelta(hours=1)


def how_it_ended(job: JobView) -> str:
    """Say how a job ended, once: its outcome, the reason, the exit status."""
    outcome, status = label(job), job.exit_status
    why = sentence(job.reason, job.hint) if job.reason else ""
    how = opening = outcome
    if outcome == "signaled" and status is not None:
        number = status - _SIGNALED
        how, opening = f"signaled by {_signal(number)}", f"ended by signal {number}"
    elif outcome == "exited" and status is not None:
        how = opening = f"exited with {status}"
        status = None
    # A reason often begins with how it ended, and goes on after a colon or a semicolon.
    begins_so = why.startswith(opening)
    said = how + why.removeprefix(opening) if begins_so else ": ".join(filter(None, (how, why)))
    return said if status is None else f"{said}; exit status {status}"


def _signal(number: int) -> str:
    from signal import Signals

    return f"{number} ({Signals(number).name})" if number in list(Signals) else str(number)


def needed(job: JobView) -> str | None:
    """Say how much of its lease an ended job needed, if that is known, and what to ask for."""
    known = [lease for lease in job.leases if lease.needed is not None]
    if not known:
        return None
    most = max(known, key=lambda lease: (lease.needed or 0) / most_of(lease))
    share = round(100 * (most.needed or 0) / most_of(most))
    text = f"{amount(most.needed)} of {leased(most)} at most ({share}%)"
    if job.advised:
        # The user of a job of Slurm used another command than the one that takes the size.
        command = "gpulease run " if job.kind == "slurm" else ""
        return f"{text}; next time {command}--mem {size(job.advised)}"
    is_short = share < _MUCH_LESS and job.exit_status == 0 and not job.sized and _ran_briefly(job)
    return f"{text}; it ran too briefly to advise a size" if is_short else text


def _ran_briefly(job: JobView) -> bool:
    if job.started_at is None or job.ended_at is None:
        return False
    return instant(job.ended_at) - instant(job.started_at) < _BRIEF


def event_detail(event: EventView) -> str:
    """Return the detail of an event, as people read it."""
    text = event.detail or ""
    return spoken(text) if text in _OUTCOMES else text


def has_seconds(event: EventView, events: Sequence[EventView], now: datetime) -> bool:
    """Tell whether seconds matter: in a short history, and in what has just happened."""
    is_short = instant(events[-1].at) - instant(events[0].at) < _SHORT_HISTORY
    return is_short or now - instant(event.at) < _SHORT_HISTORY


def cpu_time(job: JobView) -> str | None:
    """Write the CPU time of an ended job, from a second on, and its mean number of cores."""
    if job.started_at is None or job.ended_at is None or (job.cpu_seconds or 0) < 1:
        return None
    time = format_span(timedelta(seconds=job.cpu_seconds or 0))
    ran_s = max((instant(job.ended_at) - instant(job.started_at)).total_seconds(), 1)
    return f"{time}, {(job.cpu_seconds or 0) / ran_s:.2g} cores on average"


def steps(job: JobView) -> str | None:
    """Write how many training steps a job made, and how fast."""
    if not job.steps:
        return None
    rate = job.steps_per_second
    return f"{job.steps} steps" + ("" if rate is None else f", {rate:.3g} per second")


def which_try(job: JobView) -> str | None:
    """Say which try of the job this is, and after which exit codes there is a next one."""
    asked = job.queue
    if asked is None or not asked.retries:
        return None
    which = f"{asked.retried + 1} of {asked.retries + 1}"
    codes = ", ".join(map(str, asked.retry_on))
    return f"{which}, again after exit code {codes}" if codes else which


def ram_use(job: JobView) -> str | None:
    """Write the most RAM that a job used, or while it runs what holds it to its lease of RAM."""
    if job.ram_held_by is not None:
        return _RAM_HELD.get(job.ram_held_by)
    if job.ram_peak is None:
        return None
    leased_ram = "" if job.claim.ram is None else f" of {size(job.claim.ram)}"
    return f"{size(job.ram_peak)}{leased_ram} at most"


_RAM_HELD = {
    "kernel": "held by the kernel",
    "watch": "watched: a job that stays above its lease loses its largest process",
}


def next_size(job: JobView) -> int | None:
    """Return the bytes to ask for next time: what is advised, or more than was too little.

    A job that was stopped for its use needed a tenth more than its peak at least. What one needed
    that ran out of memory is not known: half as much again is an attempt.
    """
    held = max((most_of(lease) for lease in job.leases), default=0)
    if job.out_of_memory:
        return _whole(1.5 * held) if held else None
    if job.outcome == "over_lease":
        peak = max((lease.needed or lease.peak or 0 for lease in job.leases), default=0)
        return _whole(1.1 * peak) if peak > held else None
    return job.advised


def _whole(amount: float) -> int:
    """Round bytes up to a GiB."""
    return -int(-amount // _GIB) * _GIB


def commands(job: JobView) -> Iterator[tuple[str, str]]:
    """Yield what the owner of a job may want, and the command that does it."""
    if job.kind == "slurm":
        return
    name, is_run = id_of(job), job.kind == "run"
    if job.state == "ended":
        if is_run:
            yield "Read its output", f"gpulease logs {name}"
            again, more = f"gpulease again {name}", next_size(job)
            yield "Run it again", again if more is None else f"{again} --mem {size(more)}"
        return
    for each in job.suggestions:
        yield "Start it now", f"gpulease edit {name} {each.options}"
    if job.state == "queued":
        yield "See all about its place", f"gpulease show {name}"
    elif is_run:
        yield "Follow its output", f"gpulease logs -f {name}"
        yield "Get its terminal", f"gpulease attach {name}"
    if job.expires_at is not None:
        yield "Give it two more hours", f"gpulease extend {name} +2h"
    yield "End it" if job.started_at else "Take it out of the queue", f"gpulease cancel {name}"
