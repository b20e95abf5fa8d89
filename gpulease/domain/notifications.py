"""What users are notified of: which changes of their jobs, and the text of each message.

A job asks for events by their names; `time-left` has a span, as in "time-left=600". One change of a
job is one message at most, however many of its events it is. Of the elements of an array, the first
of each event is a message, and the end of the last one is a summary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from enum import StrEnum
from typing import Final

from gpulease.domain.eligibility import has_failed, succeeded
from gpulease.domain.gpu import JobId
from gpulease.domain.health import GpuAvailability
from gpulease.domain.job import Job, Outcome, UsageTotal, one_line
from gpulease.domain.lease import State
from gpulease.errors import split_hint
from gpulease.units import GIB, format_span, next_time_of_day


class NotifyEvent(StrEnum):
    """What a user may be notified of."""

    START = "start"
    END = "end"
    """Any end, a failure included."""
    FAIL = "fail"
    OOM = "oom"
    """It ran out of GPU memory."""
    OVER_LEASE = "over-lease"
    IDLE = "idle"
    """It does not use its GPU while other jobs wait."""
    TIME_LEFT = "time-left"
    """Its time limit is near."""
    DIGEST = "digest"
    """It has ended: a line of the next morning's message."""
    GPU_DRAINED = "gpu-drained"
    GPU_RESUMED = "gpu-resumed"
    TROUBLE = "daemon-trouble"
    WEEK = "week"
    """The memory that a user leased and did not use in the last 7 days."""
    COLLECTED = "collected"
    """Several notifications in one message."""
    TEST = "test"


LONGEST_BODY = 4000
"""Characters of a message."""
_GIB_HOUR = GIB * 3600
LISTED = 20
"""Titles in a collected message."""
_LISTED_IN_TITLE = 5
"""Elements of an array."""
_DIGEST_AT = time(8)
"""In the time of the machine."""


@dataclass(frozen=True, slots=True)
class Message:
    """A notification before it is stored."""

    uid: int
    """The recipient."""
    event: NotifyEvent
    title: str
    body: str
    job: JobId | None = None
    """The job that it is about."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification that is to be sent."""

    id: int
    message: Message
    attempts: int
    """Earlier attempts to send it."""


def message_on(before: Job | None, after: Job) -> Message | None:
    """Return the message about a change of a job that its owner asked for, or None."""
    has_ended = after.state is State.ENDED and (before is None or before.state is not State.ENDED)
    if has_ended and (event := _event_of_end(after)) is not None:
        return about(after, event, _body_of_end(after), what=_how_it_ended(after))
    has_started = after.started_at is not None and (before is None or before.started_at is None)
    if has_started and NotifyEvent.START in after.notify:
        waited = (after.started_at or after.submitted_at) - after.submitted_at
        text = f"It waited {format_span(waited)}."
        return about(after, NotifyEvent.START, text, what="has started")
    return None


def _event_of_end(job: Job) -> NotifyEvent | None:
    """Return the event of an end: the most specific one that the job asked for."""
    found = {
        NotifyEvent.OOM: job.usage.out_of_memory,
        NotifyEvent.FAIL: has_failed(job),
        NotifyEvent.END: True,
        NotifyEvent.DIGEST: True,
    }
    return next((event for event, is_so in found.items() if is_so and event in job.notify), None)


def due_at(message: Message, at: datetime) -> datetime | None:
    """Return when a message that is stored at an instant is to be sent; None: at once."""
    if message.event is not NotifyEvent.DIGEST:
        return None
    return next_time_of_day(_DIGEST_AT, at)


_TITLES: Final = {NotifyEvent.OVER_LEASE: "has to free memory", NotifyEvent.IDLE: "is idle"}


def about(job: Job, event: NotifyEvent, *lines: str, what: str | None = None) -> Message:
    """Return a message about a job: `what` happened to it, as the title ends."""
    what = _TITLES.get(event, event) if what is None else what
    more = f"gpulease show {job.label} shows more."
    body = "\n".join([*(line for line in lines if line), more])
    return Message(
        job.owner.uid,
        event,
        one_line(f"{job.title} ({job.name}) {what}"),
        body[:LONGEST_BODY],
        job.id,
    )


_ENDS: Final = {
    Outcome.RELEASED: "was released",
    Outcome.CANCELLED: "was cancelled",
    Outcome.TIME_LIMIT: "was stopped at its time limit",
    Outcome.OVER_LEASE: "was stopped: it held too much memory",
    Outcome.IDLE: "was stopped: it was idle",
    Outcome.GAVE_UP: "did not start",
    Outcome.PREEMPTED: "was stopped, and is queued again",
    Outcome.REQUEUED: "was stopped, and is queued again",
    Outcome.DEPENDENCY_FAILED: "did not start",
    Outcome.LAUNCH_FAILED: "could not be started",
    Outcome.LOST: "was lost",
}


def _how_it_ended(job: Job) -> str:
    if job.usage.out_of_memory:
        return "ran out of GPU memory"
    if job.outcome in _ENDS:
        return _ENDS[job.outcome]
    return "succeeded" if succeeded(job) else f"failed: {job.exit or 'ended'}"


def _body_of_end(job: Job) -> str:
    why, hint = split_hint(job.detail or "")
    ran_for = None
    if job.started_at is not None and job.ended_at is not None:
        ran_for = f"It ran for {format_span(job.ended_at - job.started_at)}."
    lines = (_sentence(why), ran_for, hint and f"hint: {hint}")
    return "\n".join(line for line in lines if line)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def first_of_array(message: Message, array: JobId) -> Message:
    """Return a message about an element, which is the only one of its event in the array."""
    more = f"Further elements of array {array} send no such message; gpulease show {array} has all."
    return replace(message, body=f"{message.body}\n{more}"[:LONGEST_BODY])


def about_array(last: Job, elements: int, failed: Sequence[str]) -> Message:
    """Return the message that the array of `last` has ended.

    `elements` is how many it had, and `failed` are the labels of those without success.
    """
    array = last.queue.array
    assert array is not None, "it is an element"
    took = (last.ended_at or last.submitted_at) - last.submitted_at
    lines = [
        f"It took {format_span(took)} from its submission.",
        *([f"Without success: {_first_of(failed, LISTED)}."] if failed else []),
        f"gpulease show {array.job} shows more.",
    ]
    good = elements - len(failed)
    title = f"array {array.job} ({last.name}) has ended: {good} of {elements} elements succeeded"
    event = NotifyEvent.END if NotifyEvent.END in last.notify else NotifyEvent.DIGEST
    if failed and event is NotifyEvent.DIGEST:  # which lists titles
        title = f"{title}, not {_first_of(failed, _LISTED_IN_TITLE)}"
    return Message(last.owner.uid, event, one_line(title), "\n".join(lines), last.id)


def _first_of(labels: Sequence[str], most: int) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return f"{', '.join(labels[:most])}{more}"


def time_left_span(events: Iterable[str]) -> timedelta | None:
    """Return how long before its time limit the owner of a job is notified; None: not at all."""
    for each in events:
        name, _, seconds = each.partition("=")
        if name == NotifyEvent.TIME_LEFT and seconds:
            return timedelta(seconds=int(seconds))
    return None


def time_is_short(job: Job, at: datetime) -> bool:
    """Return whether the time of a running job is so short that its owner asked to be notified.

    Not if the whole limit is no longer than that: the owner has just set it.
    """
    span, limit, begins = time_left_span(job.notify), job.claim.time_limit, time_is_short_from(job)
    if job.state is not State.ACTIVE or span is None or limit is None or begins is None:
        return False
    return limit > span and begins <= at


def time_is_short_from(job: Job) -> datetime | None:
    """Return when the owner of a running job is to be notified of its time limit, if at all."""
    span = time_left_span(job.notify)
    return None if span is None or job.expires_at is None else job.expires_at - span


def message_on_time(job: Job, at: datetime) -> Message:
    """Return the message that the time limit of a job is near."""
    left = format_span((job.expires_at or at) - at)
    more = f"gpulease extend {job.label} +1h gives it another hour."
    what = f"has {left} left of its time limit"
    return about(job, NotifyEvent.TIME_LEFT, more, what=what)


def about_gpu(
    uid: int, label: str, before: GpuAvailability, after: GpuAvailability
) -> Message | None:
    """Return the message to an admin that a GPU was drained or resumed; None if it was neither."""
    if (before.reason is None) is (after.reason is None):
        return None
    if after.reason is None:
        text = "It takes leases again."
        return Message(uid, NotifyEvent.GPU_RESUMED, f"GPU {label} was resumed", text)
    text = f"{_sentence(after.reason)}\ngpulease doctor shows more."
    return Message(uid, NotifyEvent.GPU_DRAINED, f"GPU {label} was drained", text)


def about_week(uid: int, total: UsageTotal) -> Message | None:
    """Return the message to a user about the last 7 days; None if hardly anything was unused."""
    leased, unused = (round(each / _GIB_HOUR) for each in (total.measured, total.unused))
    if unused < 1:
        return None
    title = f"your jobs left {unused} of {leased} GiB-hours of GPU memory unused in the last 7 days"
    failed = f", of which {total.out_of_memory} ran out of memory" if total.out_of_memory else ""
    body = (
        f"They were {total.jobs} jobs{failed}. Others could have leased that memory.\n"
        "gpulease report --since 7d sums it up; gpulease show JOB says what to ask for next time."
    )
    return Message(uid, NotifyEvent.WEEK, title, body)
