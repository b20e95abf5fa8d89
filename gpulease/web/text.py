"""Text for the page: sizes, times, states and names. Pure; the time is an argument."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from gpulease.units import format_size, format_span
from gpulease.wire.jobs import EventView, JobView, LeaseView
from gpulease.wire.machine import GpuView
from gpulease.wire.text import ending, model, user_colour
from gpulease.wire.usage import PastJobView

UNKNOWN = "unknown"
_MINUTE = timedelta(minutes=1)
_SHORT_HISTORY = timedelta(hours=1)


def size(amount: float | None) -> str:
    """Write a number of bytes; None is unknown."""
    return UNKNOWN if amount is None else format_size(int(amount))


def figure(value: float | None, unit: str) -> str:
    """Write a number with its unit; None is unknown."""
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def span(seconds: float | None) -> str:
    """Write a length of time."""
    return UNKNOWN if seconds is None else format_span(timedelta(seconds=max(0.0, seconds)))


def gib_hours(byte_seconds: float) -> str:
    """Write an amount of memory over time."""
    hours = byte_seconds / (1 << 30) / 3600
    return f"{hours:.1f}" if hours < 10 else f"{hours:.0f}"


def instant(written: str) -> datetime:
    """Read an instant of the API, in the time zone of this machine."""
    return datetime.fromisoformat(written).astimezone()


def clock(written: str | None, now: datetime, *, seconds: bool = False) -> str:
    """Write an instant, with the day if that is not today."""
    if written is None:
        return UNKNOWN
    at = instant(written)
    time = f"{at:%H:%M:%S}" if seconds else f"{at:%H:%M}"
    if at.date() == now.date():
        return time
    return f"{at:%a} {time}" if abs(at - now) < timedelta(days=6) else f"{at:%Y-%m-%d} {time}"


def event_time(event: EventView, events: Sequence[EventView], now: datetime) -> str:
    """Write when something happened: with seconds in a short history, and if it is recent."""
    is_short = instant(events[-1].at) - instant(events[0].at) < _SHORT_HISTORY
    is_recent = now - instant(event.at) < _SHORT_HISTORY
    return clock(event.at, now, seconds=is_short or is_recent)


def since(written: str, now: datetime) -> str:
    """Write the time since an instant, in whole minutes."""
    return _minutes(now - instant(written))


def until(written: str, now: datetime) -> str:
    """Write the time until an instant, in whole minutes."""
    return _minutes(instant(written) - now)


def _minutes(length: timedelta) -> str:
    # A view that changes each second would be sent each second.
    return format_span(length // _MINUTE * _MINUTE) if length >= _MINUTE else "under 1m"


def between(begin: str, end: str) -> str:
    """Write the time between two instants."""
    return format_span(instant(end) - instant(begin))


def gpu_label(gpu: GpuView) -> str:
    """Return the index of a GPU as people know it: 0, or 0:1 for a MIG device."""
    return gpu.label or str(gpu.index)


def models_of(gpus: Iterable[GpuView]) -> Mapping[str, int]:
    """Return how many GPUs there are of each model and size: A100 24G."""
    return Counter(model(gpu.name, gpu.memory.total) for gpu in gpus)


def labels_of(gpus: Iterable[GpuView]) -> Mapping[str, str]:
    """Return the index of each GPU by its UUID."""
    return {gpu.uuid: gpu_label(gpu) for gpu in gpus}


def id_of(job: JobView) -> str:
    """Return the id of a job, or those of the waiting elements of an array in one row."""
    queue = job.queue
    if queue is not None and queue.array_waiting is not None:
        return f"{queue.array}_[{queue.array_waiting.indices}]"
    return job.label or str(job.id)


def jobs_in(rows: Iterable[JobView]) -> int:
    """Return how many jobs rows stand for."""
    waiting = (job.queue.array_waiting if job.queue is not None else None for job in rows)
    return sum(1 if each is None else each.jobs for each in waiting)


def address_of(job: JobView | PastJobView) -> str:
    """Return the last part of the address of a job; the bare id of an array is that of all."""
    if isinstance(job, JobView) and job.queue is not None and job.queue.array_waiting is not None:
        return str(job.queue.array)
    return job.label if job.label.startswith(f"{job.id}_") else str(job.id)


def remark_on(job: JobView, now: datetime) -> str:
    """Write the state of a job that holds memory; nothing if it simply runs within its lease."""
    over = [each for each in job.leases if each.over_since_at is not None]
    if over:
        stops = [each.stops_at for each in over if each.stops_at is not None]
        return "over" + (f", stops in {until(min(stops), now)}" if stops else "")
    if job.suspended or job.state != "active":
        return state_of(job)
    if any(map(_is_above, job.leases)):
        return "above"
    if job.idle_ends_at is not None:
        return f"idle, ends in {until(job.idle_ends_at, now)}"
    return "no framework limit" if job.hook in ("failed", "absent") else ""


def _is_above(lease: LeaseView) -> bool:
    return lease.used is not None and lease.used > lease.memory


def reason_of(job: JobView) -> str:
    """Write why a job waits or how it ended, unless state and exit status say it."""
    return "" if job.reason in (None, f"exited with {job.exit_status}") else job.reason or ""


def state_of(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    if job.suspended:
        return "suspended"
    return job.state if job.state != "ended" else ending(job)


def kind_of(job: JobView | PastJobView) -> str:
    """Write what sets a job apart from one that was run: a hold, or a job of Slurm."""
    if job.slurm_job is not None:
        return "Slurm"
    return "hold" if job.kind == "hold" else ""


def colors(users: Iterable[str | None]) -> Mapping[str | None, str]:
    """Return the classes of each user in style.css; of two with one colour the second is marked."""
    chosen: dict[str | None, str] = {}
    for user in sorted({each for each in users if each is not None}):
        own = f"o{user_colour(user)}"
        chosen[user] = f"{own} second" if own in chosen.values() else own
    return chosen
