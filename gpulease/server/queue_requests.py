"""What a request asks of the queue, every field checked.

Nothing here looks at other jobs: `service.dependencies` finds those that a job waits for.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from gpulease.domain.gpu import JobId
from gpulease.domain.queue_options import (
    Condition,
    Indices,
    Priority,
    QueueOptions,
    WantedDependency,
)
from gpulease.errors import BadValue, NotAllowed
from gpulease.server.validation import refuse
from gpulease.wire.ranges import checked_nice
from gpulease.wire.requests import (
    LARGEST_INDEX,
    MOST_DEPENDENCIES,
    MOST_ELEMENTS,
    QueueRequest,
)

_BEGIN, _AFTER = "queue.begin_at", "queue.after"
_YEARS = range(2000, 3000)
"""Of a begin time; sums of instants and spans stay within what datetime can hold."""
_DEPENDENCY = re.compile(r"(\d{1,18})(?:_(\d{1,6}))?(?::(ok|fail|any))?", re.ASCII)
_INDICES = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?", re.ASCII)
_LIMIT = re.compile(r"\d{1,6}", re.ASCII)


def queue_options_of(asked: QueueRequest, *, is_admin: bool) -> QueueOptions:
    """Return the options of the queue, without dependencies and array.

    Raises:
        BadValue: a field is out of range.
        NotAllowed: only admins may ask for it.
    """
    if not is_admin:
        _refuse_privileges(asked)
    return QueueOptions(
        priority=Priority(asked.priority),
        nice=checked_nice(asked.nice),
        held=asked.held,
        begin_at=begin_of(asked.begin_at),
        requeue=asked.requeue,
        preemptible=asked.preemptible,
    )


def _refuse_privileges(asked: QueueRequest) -> None:
    if asked.priority == "high":
        raise NotAllowed.of_field(
            "queue.priority",
            asked.priority,
            "only admins of this machine may",
            "leave out --priority, or use --priority low for jobs that can wait",
        )
    if asked.nice < 0:
        raise NotAllowed.of_field(
            "queue.nice",
            asked.nice,
            "only admins may go below 0",
            "use a value from 0 to 19; a higher one starts later",
        )


def begin_of(written: str | None) -> datetime | None:
    """Return the instant before which a job does not start; None stays None.

    Raises:
        BadValue: it is not an instant with a time zone, or out of range.
    """
    if written is None:
        return None
    try:
        at = datetime.fromisoformat(written)
        if at.tzinfo is None:
            raise BadValue.of_field(_BEGIN, repr(written[:40]), "it has no time zone")
        at = at.astimezone(UTC)
    except (ValueError, OverflowError):
        why, example = "it is not an instant", "such as 2027-01-31T22:00:00+01:00"
        raise BadValue.of_field(_BEGIN, repr(written[:40]), why, example) from None
    if at.year not in _YEARS:
        raise BadValue.of_field(_BEGIN, repr(written[:40]), "it is out of range")
    return at


def dependencies_of(asked: Iterable[str]) -> tuple[WantedDependency, ...]:
    """Return the jobs that a job waits for, as they were written.

    Raises:
        BadValue: one of them cannot be read, or there are too many.
    """
    wanted = tuple(dict.fromkeys(map(_dependency, asked)))
    if len(wanted) > MOST_DEPENDENCIES:
        what = f"with {len(wanted)} jobs"
        raise BadValue.of_field(_AFTER, what, f"at most {MOST_DEPENDENCIES} are possible")
    return wanted


def _dependency(text: str) -> WantedDependency:
    found = _DEPENDENCY.fullmatch(text)
    if found is None:
        raise BadValue.of_field(
            _AFTER,
            repr(text[:40]),
            "it is not a job to wait for",
            "such as 17, 17_3 for an element of an array, or 17:any; also :ok and :fail",
        )
    job, index, condition = found.groups()
    return WantedDependency(
        JobId(int(job)), None if index is None else int(index), Condition(condition or "ok")
    )


def indices_of(asked: str | None) -> Indices | None:
    """Return the indices of an array, such as "0-99%8", "1,3,5" or "0-30:5".

    Raises:
        BadValue: they cannot be read, or are too many.
    """
    if asked is None:
        return None
    ranges, percent, limit = asked.replace(" ", "").partition("%")
    if percent and (_LIMIT.fullmatch(limit) is None or int(limit) < 1):
        refuse(f"{limit[:20]!r} is not a number of elements that may run at once", "0-99%8")
    indices: set[int] = set()
    for each in ranges.split(",", MOST_ELEMENTS):
        indices.update(_range(each))
        if len(indices) > MOST_ELEMENTS:
            refuse(
                f"the array has more than {MOST_ELEMENTS} elements",
                "submit several arrays, one after the other",
            )
    return Indices(tuple(sorted(indices)), int(limit) if percent else None)


def _range(text: str) -> range:
    found = _INDICES.fullmatch(text)
    if found is None:
        refuse(
            f"{text[:40]!r} is not an index or a range of indices up to {LARGEST_INDEX}",
            "write an array as 0-99, 1,3,5 or 0-30:5, and 0-99%8 for at most 8 at once",
        )
    first, last, step = (None if part is None else int(part) for part in found.groups())
    assert first is not None, "the pattern requires it"
    last = first if last is None else last
    if last < first or step == 0:
        refuse(f"the range {text} is empty", "the lower index comes first: 0-99")
    return range(first, last + 1, step or 1)
