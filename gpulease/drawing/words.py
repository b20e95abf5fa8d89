"""Text for people: names, sizes, times and states. Pure; the time is an argument."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpulease.units import GIB, counted, format_instant, format_size, format_span
from gpulease.wire.text import claimed, leased, most_of, name_of_row, ordinal, ranges, spoken
from gpulease.wire.text import clean as clean  # noqa: PLC0414 -- a word for people, too

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Literal

    from gpulease.wire.jobs import ExplainView, JobView, LeaseView, RefusalView
    from gpulease.wire.machine import EnforcementLevelView, GpuView
    from gpulease.wire.usage import PastJobView

UNKNOWN = "?"
"""What is not known. An empty text means none."""
_MANY_DIGITS = 3
_MINUTE = timedelta(minutes=1)
_LONG_IDLE = timedelta(hours=1)
"""A job that is idle for less is not remarked on."""


def sentence(reason: str, hint: str | None = None) -> str:
    """Return a reason, with its hint, on one line."""
    return clean(f"{reason}; hint: {hint}" if hint else reason)


def because(job: JobView) -> str:
    """Write the reason of a job as it follows what happens to it: ": no GPU has 4G free"."""
    return f": {sentence(job.reason, job.hint)}" if job.reason else ""


def in_line(job: JobView) -> str:
    """Write the place of a job as it follows "waits": ", 3rd in line"."""
    return f", {ordinal(job.position)} in line" if job.position else ""


_NARROW = dict.fromkeys(map(ord, "█▒▚░▓╱…"))
_FIRST_COMBINING = "\u0300"


def _is_narrow(text: str) -> bool:
    """Return whether each character takes one column, as those of Latin scripts and of bars do."""
    return text.isascii() or max(text.translate(_NARROW), default="") < _FIRST_COMBINING


def display_width(text: str) -> int:
    """Return how many columns `text` takes on a terminal."""
    if _is_narrow(text):
        return len(text)
    # rich has the tables of wide and combining characters.
    from rich.cells import cell_len

    return cell_len(text)


def truncate(text: str, width: int) -> str:
    """Return as much of the beginning of `text` as takes at most `width` columns."""
    if width <= 0 or _is_narrow(text):
        return text[: max(0, width)]
    from rich.cells import chop_cells

    return chop_cells(text[: 4 * width], width)[0]


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with an ellipsis where something was cut."""
    if display_width(text) <= width:
        return text
    return truncate(text, width - 1).rstrip() + "…" if width > 0 else ""


def shorten_middle(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with its beginning and its end."""
    if display_width(text) <= width:
        return text
    # The name of a row for similar jobs has an ellipsis already.
    text = text.replace(" ... ", "… ")
    if display_width(text) <= width:
        return text
    tail = (width - 1) // 2
    # The end of a text is the beginning of the reversed one.
    end = truncate(text[::-1], tail)[::-1]
    return truncate(text, width - 1 - tail) + "…" + end if width > 0 else ""


def size(amount: int | None, unknown: str = UNKNOWN) -> str:
    """Write a number of bytes; None is unknown."""
    return unknown if amount is None else format_size(amount)


def amount(memory: int | None) -> str:
    """Write memory in use, in at most four digits: 0, 9.5G, 307M."""
    text = size(memory)
    whole, _, tenth = text.partition(".")
    return f"{whole}{tenth[1:]}" if len(whole) >= _MANY_DIGITS else text


def gib_hours(byte_seconds: float) -> str:
    """Write an amount of memory over time, in GiB-hours."""
    return f"{byte_seconds / GIB / 3600:.2f}"


def figure(value: float | None, unit: str, unknown: str = UNKNOWN) -> str:
    """Write a number with its unit; None is unknown."""
    return unknown if value is None else f"{value:.0f}{unit}"


def percent(value: int | None) -> str:
    """Write a utilization; None is unknown."""
    return figure(value, "%")


def degrees(value: int | None) -> str:
    """Write a temperature in degrees Celsius; None is unknown."""
    return figure(value, "C")


def instant(written: str) -> datetime:
    """Read an instant of the API."""
    # Python 3.10, on which gpulease.lease runs, does not know the letter.
    return datetime.fromisoformat(written.replace("Z", "+00:00"))


def index_of(gpu: GpuView | RefusalView) -> str:
    """Return the index of a GPU; that of a MIG device is 0:1."""
    return clean(gpu.label) or str(gpu.index)


def clock(written: str | None, now: datetime, *, seconds: bool = False) -> str:
    """Write an instant in the time zone of `now`, with the day if that is not today."""
    if written is None:
        return UNKNOWN
    # The zone of a local `now` is only its offset from UTC, which is another one in summer.
    is_local = now.utcoffset() == now.astimezone().utcoffset()
    at = instant(written).astimezone(None if is_local else now.tzinfo)
    return format_instant(at, now, seconds=seconds)


def span(length: timedelta) -> str:
    """Write a length of time; one below zero, after the clock was set, is 0s."""
    return format_span(max(length, timedelta(0)))


def rough_span(length: timedelta) -> str:
    """Write a length of time that is redrawn when it has changed: in minutes, from one on."""
    return span(length // _MINUTE * _MINUTE if length >= _MINUTE else length)


def span_in_minutes(length: timedelta) -> str:
    """Write a length of time that is sent when it has changed: never in seconds."""
    return rough_span(length) if length >= _MINUTE else "under 1m"


def until(written: str | None, now: datetime, *, write: Callable[[timedelta], str] = span) -> str:
    """Write the time from `now` to an instant."""
    return UNKNOWN if written is None else write(instant(written) - now)


def between(start: str | None, end: str | None, now: datetime) -> str:
    """Write the time from `start` to `end`, or to `now`; nothing if there was no start."""
    if start is None:
        return ""
    return span((instant(end) if end else now) - instant(start))


def since(written: str, now: datetime) -> str:
    """Write the time since an instant."""
    return span(now - instant(written))


def minutes_since(written: str, now: datetime) -> str:
    """Write the time since an instant where it is sent when it has changed."""
    return span_in_minutes(now - instant(written))


def labels_of(gpus: Iterable[GpuView]) -> dict[str, str]:
    """Return the index of each GPU, as people see it, by its UUID."""
    return {gpu.uuid: index_of(gpu) for gpu in gpus}


def lease_of(leases: Sequence[LeaseView]) -> str:
    """Write what is leased in all, with the bound of a range on one GPU."""
    return leased(leases[0]) if len(leases) == 1 else size(sum(each.memory for each in leases))


SUSPENDED = "suspended"
"""The state shown for an active job with a stopped main process."""


def requested(job: JobView) -> str:
    """Write what a job asked for: 4G, 2 x 40%, 4G exclusive, 4G on GPU 1."""
    return claimed(job.claim)


def id_of(job: JobView) -> str:
    """Return the id of a job as people see it: 17, or 17_3 for an element of an array."""
    return clean(job.label) or str(job.id)


def in_the_way(job: JobView | ExplainView) -> str:
    """Write which job has to end for a waiting one, or of how many some do; empty for none."""
    if len(job.waits_for) > 1:
        return f"one or more of {len(job.waits_for)} jobs"
    return "".join(f"job {clean(str(each))}" for each in job.waits_for_labels or job.waits_for)


def behind_of(job: JobView | ExplainView) -> str | None:
    """Return the id of the job that memory is reserved for, as people see it."""
    return None if job.behind is None else clean(job.behind_label or str(job.behind))


def sharing(job: JobView, indexes: Mapping[str, str]) -> str | None:
    """Say which busy GPUs a job shares, and with which jobs; `indexes` are by UUID."""
    parts = [
        f"{f'GPU {indexes[each.gpu]}' if each.gpu in indexes else clean(each.gpu)} with "
        f"job{'s' * (len(each.shared_with) > 1)} {clean(', '.join(each.shared_with))}"
        for each in job.leases
        if each.shared_with
    ]
    if not parts:
        return None
    all_of = (
        "both" if len({other for each in job.leases for other in each.shared_with}) == 1 else "all"
    )
    return f"{', '.join(parts)}; {all_of} may run slower"


_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)


def starts_in(job: JobView | ExplainView, now: datetime) -> str:
    """Write when a waiting job probably starts: in 1-9 h, soon; empty if that is unknown."""
    start, at = job.expected_start, job.expected_start_at
    if at is None:
        return ""
    if start is None or start.from_at is None or start.until_at is None:
        return f"at {clock(at, now)}"  # an older daemon gives no range
    if instant(at) - now <= _MINUTE:
        return "late" if start.is_late else "soon"
    if start.from_at == start.until_at:
        return f"at {clock(at, now)}"
    return _in(instant(start.from_at) - now, instant(start.until_at) - now)


def _in(low: timedelta, high: timedelta) -> str:
    """Write a range of time in the grain that it has, which is an hour at least."""
    unit, name = (_DAY, "days") if high >= 1.5 * _DAY else (_HOUR, "h")
    most, least = round(high / unit), round(low / unit)
    if least >= 1:
        return f"in {least}-{most} {name}"
    if most <= 1:
        return "within the hour"
    soonest = round(low / _HOUR)
    return f"in {soonest} h to {most} {name}" if soonest >= 1 else f"within {most} {name}"


def probable_start(job: JobView | ExplainView, now: datetime, owner: str = "") -> str | None:
    """Say when a waiting job probably starts, after which job, and from when memory is kept for it.

    `owner` is what is known about the job that has to end.
    """
    start, when = job.expected_start, starts_in(job, now)
    said = [_start_in_full(job, when, now, owner)] if when else []
    if start is not None and start.kept_free_from_at is not None:
        is_now = instant(start.kept_free_from_at) - now <= _MINUTE
        from_when = "now" if is_now else f"from {clock(start.kept_free_from_at, now)}"
        said.append(f"memory is kept free for it {from_when}")
    return "; ".join(said) or None


def why_and_when(job: JobView, now: datetime, owner: str = "") -> str:
    """Say behind a word such as waits why a job does, and when it probably starts."""
    starts = probable_start(job, now, owner)
    if starts is None and job.waits_for:
        starts = f"after {in_the_way(job)}{owner}"
    parts = (": ", reason_of(job, now)), ("; ", starts)
    return "".join(f"{mark}{text}" for mark, text in parts if text)


def _start_in_full(job: JobView | ExplainView, when: str, now: datetime, owner: str) -> str:
    start = job.expected_start
    if start is None or start.after is None or start.from_at is None or start.until_at is None:
        return f"probably {when}"
    ends = f"job {clean(start.after_label or str(start.after))}{owner}"
    late = "; it has run longer than predicted" if start.after_is_late else ""
    if when in ("soon", "late"):
        return f"{'later than predicted' if start.is_late else when}, after {ends}{late}"
    low, high = instant(start.from_at) - now, instant(start.until_at) - now
    times = ""
    if low > _HOUR / 2:
        times = f" ({_mark(start.from_at, now, high)}-{_mark(start.until_at, now, high)})"
    return f"probably {when}{times}, after {ends}{late}"


def _mark(written: str, now: datetime, ahead: timedelta) -> str:
    """Write an end of a range that ends so far ahead: 17:00, without a day that is plain, 3 Mar."""
    at = clock(written, now)
    if ahead < _DAY:
        return at[-len("17:00") :]
    return f"{instant(written).astimezone(now.tzinfo):%-d %b}" if ahead >= 1.5 * _DAY else at


def ids_of(alike: Sequence[JobView]) -> str:
    """Return the ids of jobs that share a row: 17, or 17_[3-99] for elements of an array."""
    queue = alike[0].queue
    if queue is not None and queue.array_waiting is not None:
        return f"{queue.array}_[{clean(queue.array_waiting.indices)}]"
    if len(alike) == 1:
        return id_of(alike[0])
    indices = sorted(job.queue.array_index or 0 for job in alike if job.queue is not None)
    return f"{queue.array if queue is not None else None}_[{ranges(indices)}]"


def alike(jobs: Iterable[JobView]) -> list[list[JobView]]:
    """Return jobs in groups that share a row, in the order of the first of each.

    Elements of one array are alike if they have not started and have the same state and reason.
    """
    groups: dict[tuple[object, ...], list[JobView]] = {}
    for job in jobs:
        queue = job.queue
        # One that stands for others has a row already.
        array = None if queue is None or queue.array_waiting else queue.array
        key: tuple[object, ...] = (job.id,)
        if array is not None and job.started_at is None and job.state in ("queued", "ended"):
            key = array, job.state, job.outcome, job.reason, _begin_of(job)
        groups.setdefault(key, []).append(job)
    return [[first_of_row(group), *group[1:]] for group in groups.values()]


def first_of_row(jobs: Sequence[JobView]) -> JobView:
    """Return the first of jobs that share a row, with the name of the row."""
    first = jobs[0]
    if (name := name_of_row([job.name for job in jobs])) != first.name:
        from copy import copy

        first = copy(first)
        first.name = name
    return first


def reason_of(job: JobView, now: datetime) -> str | None:
    """Write why a job waits or how it ended, with its begin time if it waits for that."""
    if (begin := _begin_of(job)) is not None:
        if job.queue is not None and job.queue.retried:
            return f"try {job.queue.retried + 1} not before {clock(begin, now, seconds=True)}"
        return f"not before {clock(begin, now)}"
    return sentence(job.reason) if job.reason else None


def _begin_of(job: JobView) -> str | None:
    """Return the begin time of a job that waits for nothing else first."""
    options = job.queue
    return options.begin_at if options and options.blocked_by == "begin" else None


def named(job: JobView | PastJobView) -> str:
    """Write the name of a job, marked if it is a lease without a job, or a job of Slurm."""
    name = clean(job.name)
    if job.slurm_job is not None:
        return f"{name} (Slurm)"
    if job.kind != "hold":
        return name
    return "(hold)" if name == "hold" else f"{name} (hold)"


def label(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    if job.suspended:
        return SUSPENDED
    return job.state if job.state != "ended" else spoken(job.outcome or "ended")


def jobs_in(rows: Iterable[JobView]) -> int:
    """Return how many jobs rows stand for: one may be for the waiting elements of an array."""
    arrays = (job.queue.array_waiting if job.queue is not None else None for job in rows)
    return sum(1 if each is None else each.jobs for each in arrays)


def cancelled(ended: int, ending: int) -> str:
    """Say how many jobs are cancelled, and how many of them still end."""
    found = ((ended, "cancelled"), (ending, "ending"))
    parts = [f"{counted(n, 'job')} {'is' if n == 1 else 'are'} {what}" for n, what in found if n]
    return "; ".join(parts)


def remark_on(
    job: JobView,
    leases: Sequence[LeaseView],
    now: datetime,
    *,
    write: Callable[[timedelta], str] = span,
) -> tuple[str, Literal["", "warn", "bad"]]:
    """Write the state of a job with regard to some of its leases, and how bad that is.

    It is empty if the job simply runs within them.
    """
    over = [each for each in leases if each.over_since_at is not None]
    if over:
        stops = [each.stops_at for each in over if each.stops_at is not None]
        when = f", stops in {until(min(stops), now, write=write)}" if stops else ""
        return f"{'asked back' if all(map(is_asked_back, over)) else 'over'}{when}", "bad"
    if not job.suspended and any(is_above(job, lease) for lease in leases):
        return "above", "warn"
    if label(job) != "active":
        return label(job), "warn"
    if job.idle_ends_at is not None:
        return f"idle, ends in {until(job.idle_ends_at, now, write=write)}", "warn"
    if job.idle_since_at is not None and now - instant(job.idle_since_at) >= _LONG_IDLE:
        return f"idle for {write(now - instant(job.idle_since_at))}", "warn"
    return ("no framework limit", "warn") if lacks_limit(job) else ("", "")


def lacks_limit(job: JobView) -> bool:
    """Return whether a framework in a process of the job is not limited to the lease."""
    return job.hook in ("failed", "absent")


def is_above(job: JobView, lease: LeaseView) -> bool:
    """Return whether a job uses more than it leased, at present without consequences.

    It is within the tolerance, or no job waits for the memory and leases are elastic.
    """
    above = lease.used is not None and lease.used > most_of(lease)
    return above and lease.over_since_at is None and job.state == "active"


def is_asked_back(lease: LeaseView) -> bool:
    """Return whether what a job is over by is within its range: others need the memory."""
    return lease.memory_bound is not None and (lease.used or 0) <= lease.memory_bound


def enforcement(levels: Sequence[EnforcementLevelView]) -> str:
    """Name the levels that enforce leases on this machine, and those that do not."""
    available = ", ".join(_level(each) for each in levels if each.available)
    missing = ", ".join(_level(each) for each in levels if not each.available)
    text = f"leases are enforced by: {available or 'nothing'}"
    return f"{text}; not by: {missing} (see gpulease doctor)" if missing else text


def _level(level: EnforcementLevelView) -> str:
    return clean(level.rung) + (" (not for all users)" if level.varies else "")
