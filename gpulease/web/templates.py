"""The templates of the page: every text in them is cleaned and escaped."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpulease import __version__
from gpulease.drawing import words
from gpulease.drawing.arrays import indices_of
from gpulease.drawing.gpus import exclusive_job, models, notes, places, remainder
from gpulease.units import format_size, format_span
from gpulease.wire.jobs import EventView, JobView
from gpulease.wire.machine import GpuView
from gpulease.wire.text import (
    claimed,
    clean,
    ending,
    free_of,
    has_failed,
    leased,
    model,
    ordinal,
    shown_command,
    spoken,
    used_without_lease,
    user_colour,
)
from gpulease.wire.usage import PastJobView

UNKNOWN = "unknown"
"""A page has room for the word."""
_SHORT_HISTORY = timedelta(hours=1)


def figure(value: float | None, unit: str) -> str:
    """Write a number with its unit; None is unknown."""
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def known_size(amount: float | None) -> str:
    """Write a number of bytes; None is unknown."""
    return UNKNOWN if amount is None else format_size(int(amount))


def known_clock(written: str | None, now: datetime) -> str:
    """Write an instant, with the day if that is not today; None is unknown."""
    return UNKNOWN if written is None else words.clock(written, now)


def span(seconds: float) -> str:
    """Write a length of time."""
    return format_span(timedelta(seconds=seconds))


def gib_hours(byte_seconds: float) -> str:
    """Write an amount of memory over time."""
    hours = byte_seconds / (1 << 30) / 3600
    return f"{hours:.1f}" if hours < 10 else f"{hours:.0f}"


def event_time(event: EventView, events: Sequence[EventView], now: datetime) -> str:
    """Write when something happened: with seconds in a short history, and if it is recent."""
    at = words.instant(event.at)
    is_short = words.instant(events[-1].at) - words.instant(events[0].at) < _SHORT_HISTORY
    return words.clock(event.at, now, seconds=is_short or now - at < _SHORT_HISTORY)


def ids_of(job: JobView) -> str:
    """Return the id of a job, or those of the waiting elements of an array in one row."""
    return words.ids_of([job])


def address_of(job: JobView | PastJobView) -> str:
    """Return the last part of the address of a job; the bare id of an array is that of all."""
    if isinstance(job, JobView) and job.queue is not None and job.queue.array_waiting is not None:
        return str(job.queue.array)
    return job.label if job.label.startswith(f"{job.id}_") else str(job.id)


def state_of(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    return words.label(job) if job.state != "ended" else ending(job)


def reason_of(job: JobView) -> str:
    """Write why a job waits or how it ended, unless state and exit status say it."""
    return "" if job.reason in (None, f"exited with {job.exit_status}") else job.reason or ""


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


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar, in percent of the memory."""

    kind: str
    """The class in style.css."""
    at: float
    width: float
    what: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The memory of one GPU."""

    segments: Sequence[Segment]
    rest: str
    """The class of what remains: free, unless nothing can be leased there."""
    used: int | None
    leased: int
    unmanaged: int
    free: int | None
    total: int | None

    @property
    def summary(self) -> str:
        """The bar in words."""
        parts = [f"{known_size(self.used)} used", f"{known_size(self.leased)} leased"]
        parts += [f"{known_size(self.unmanaged)} without a lease"] if self.unmanaged else []
        return f"{', '.join(parts)}, {known_size(self.free)} free of {known_size(self.total)}"


def bar_of(
    gpu: GpuView, jobs: Sequence[JobView], colors: Mapping[str | None, str], unmanaged: int
) -> Bar:
    """Return the bar of a GPU, on which `unmanaged` bytes are used without a lease.

    `colors` has the classes of each user.
    """
    memory = gpu.memory
    parts: list[tuple[str, int, str]] = []
    for job in jobs:
        for lease in job.leases:
            if lease.gpu == gpu.uuid:
                used, color = lease.used or 0, colors.get(job.user, "others")
                who = f"job {words.id_of(job)} of {job.user}"
                parts.append((f"used {color}", used, f"{who} uses {known_size(used)}"))
                rest = max(0, lease.memory - used)
                parts.append((f"leased {color}", rest, f"{who} has leased {known_size(rest)} more"))
    parts.append(("unmanaged", unmanaged, f"{known_size(unmanaged)} without a lease"))
    segments = tuple(_segments(parts, memory.total)) if memory.total else ()
    alone, free = exclusive_job(gpu, jobs), free_of(gpu)
    rest_kind: str = remainder(free, is_exclusive=alone is not None)
    if alone is not None:
        rest_kind = f"leased {colors.get(alone.user, 'others')}"
    return Bar(segments, rest_kind, memory.used, memory.leased, unmanaged, free, memory.total)


def _segments(parts: Sequence[tuple[str, int, str]], total: int) -> Iterable[Segment]:
    # In hundredths of a percent.
    taken = places((amount for _, amount, _ in parts), total, 10_000)
    for (kind, _, what), (begin, end) in zip(parts, taken, strict=True):
        if end > begin:
            yield Segment(kind, begin / 100, (end - begin) / 100, what)


def machine_models(gpus: Sequence[GpuView]) -> str:
    """Write the models of all GPUs: 4 x A100 24G."""
    return models([(words.index_of(gpu), model(gpu.name, gpu.memory.total)) for gpu in gpus])


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "address_of": address_of,
    "between": words.between,
    "claimed": claimed,
    "clock": known_clock,
    "ending": ending,
    "event_time": event_time,
    "figure": figure,
    "gib_hours": gib_hours,
    "gpu_label": words.index_of,
    "has_failed": has_failed,
    "ids_of": ids_of,
    "in_the_way": words.in_the_way,
    "indices_of": indices_of,
    "kind_of": kind_of,
    "ordinal": ordinal,
    "probable_start": words.probable_start,
    "reason_of": reason_of,
    "shown_command": shown_command,
    "size": known_size,
    "is_asked_back": words.is_asked_back,
    "leased": leased,
    "span": span,
    "starts_in": words.starts_in,
    "state_of": state_of,
    "spoken": spoken,
    "until": partial(words.until, write=words.span_in_minutes),
}


def _finalize(value: Any) -> Any:
    """Clean what a template prints. What users write goes through this, wherever it stands."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return clean(value)
    return value


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("gpulease.web"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(_FILTERS)
    made.globals.update(
        version=__version__,
        bar_of=bar_of,
        exclusive_job=exclusive_job,
        labels_of=words.labels_of,
        machine_models=machine_models,
        notes=notes,
        remark_on=partial(words.remark_on, write=words.span_in_minutes),
        used_without_lease=used_without_lease,
    )
    return made


_ENVIRONMENT = _environment()
# Compiled at the start: a sandbox may hide their files later.
_TEMPLATES = {name: _ENVIRONMENT.get_template(name) for name in _ENVIRONMENT.list_templates()}


def render(name: str, path: str, **values: Any) -> str:
    """Return a page for the request of `path`, from which its links are relative.

    So they work under any path of a proxy.
    """
    root = "../" * (path.count("/") - 1) or "./"
    now = values.pop("now", None) or datetime.now().astimezone()
    return _TEMPLATES[name].render(root=root, now=now, **values)
