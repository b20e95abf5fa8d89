"""Fields of requests, each checked against its limits.

Every function raises BadValue for a value out of range, and TooLarge for one that is too long.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Annotated, NoReturn

from msgspec import Meta

from gpulease.domain.gpu import JobId
from gpulease.domain.lease import LONGEST_TIME, Claim
from gpulease.domain.queue_options import (
    FIRST_RETRY_DELAY,
    LONGEST_RETRY_DELAY,
    Condition,
    Indices,
    Priority,
    QueueOptions,
    WantedDependency,
)
from gpulease.errors import BadValue, NotAllowed, TooLarge
from gpulease.units import MOST_PARTS, Share, format_size, format_span, round_up_size
from gpulease.wire.notifications import notify_events
from gpulease.wire.ranges import (
    LARGEST_SIZE,
    MOST_GPUS,
    check_claim,
    check_counts,
    checked_nice,
    written_span,
)
from gpulease.wire.requests import (
    LARGEST_EXEC,
    LARGEST_INDEX,
    LARGEST_STRING,
    LONGEST_NAME,
    MOST_DEPENDENCIES,
    MOST_ELEMENTS,
    ClaimRequest,
    QueueRequest,
    WorkerOptionsRequest,
    exec_size,
    from_wire,
)
from gpulease.wire.text import clean

_LONGEST_KEY = 64
_MOST_RETRIES = 100
_MOST_RETRY_CODES = 50
_AFTER = "queue.after"
_YEARS = range(2000, 3000)
"""Of an instant; sums of instants and spans stay within what datetime can hold."""
_DEPENDENCY = re.compile(r"(\d{1,18})(?:_(\d{1,6}))?(?::(ok|fail|any))?", re.ASCII)
_INDICES = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?", re.ASCII)
_LIMIT = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings that requests depend on."""

    memory: int | Share
    """The lease of a job that asks for no size."""
    longest_grace: timedelta = timedelta(hours=1)
    """The longest grace that a job may ask for."""


LookBack = Annotated[float, Meta(ge=1, le=LONGEST_TIME.total_seconds())]
"""Seconds before now, as a parameter of a query."""
NamePattern = Annotated[str, Meta(max_length=LONGEST_NAME)]
"""A shell pattern for names of jobs."""


def refuse(why: str, hint: str | None = None) -> NoReturn:
    """Refuse a submission. Raises: BadValue, always."""
    raise BadValue(f"cannot submit: {why}", hint)


def bytes_string(what: str, text: str) -> str:
    """Return the operating system's string for text of one character per byte."""
    if "\0" in text:
        refuse(f"the {what} contains a NUL byte")
    if len(text) >= LARGEST_STRING:
        raise TooLarge(
            f"cannot submit: the {what} is {format_size(len(text))} long, "
            f"and the kernel takes less than {format_size(LARGEST_STRING)}",
            "pass it in a file",
        )
    try:
        return from_wire(text)
    except UnicodeEncodeError:
        refuse(f"the {what} is not written as one character per byte")


def _variable(name: str) -> str:
    if not name or "=" in name:
        refuse(f"{name[:40]!r} is not a name of a variable")
    return bytes_string("name of a variable", name)


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as the operating system's strings."""
    return {
        _variable(name): bytes_string(f"variable {clean(name[:40])}", value)
        for name, value in given.items()
    }


def refuse_oversized_exec(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Check that execve(2) takes arguments and environment of this size."""
    size = exec_size(argv, environment)
    if size > LARGEST_EXEC:
        raise TooLarge(
            f"cannot submit: arguments and environment are {format_size(size)} together, "
            f"and the kernel takes {format_size(LARGEST_EXEC)}",
            "unset large variables, or put their contents in a file",
        )


def checked_key(key: str | None) -> str | None:
    """Return the key of a submission, if it can be stored."""
    if key is None or (key.isascii() and key.isprintable() and 0 < len(key) <= _LONGEST_KEY):
        return key
    raise BadValue(
        f"cannot use the key {key[:40]!r}: a key is 1 to {_LONGEST_KEY} printable ASCII characters",
        "use a random UUID",
    )


def claim_of(asked: ClaimRequest, defaults: Defaults) -> Claim:
    """Return a claim, with `defaults` where the request leaves a field out."""
    check_claim(asked)
    limit, memory = asked.time_limit, _memory(asked, defaults)
    bound = _size_or_share(asked.memory_bound, asked.share_bound)
    return Claim(
        memory,
        asked.gpus,
        asked.exclusive,
        None if limit is None else timedelta(seconds=limit),
        model=None if asked.model is None else asked.model.strip(),
        min_vram=asked.min_vram,
        same_model=asked.same_model,
        linked=asked.linked,
        memory_bound=None if bound == memory else bound,
        ram=asked.ram,
        cpus=asked.cpus,
    )


def gpu_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of GPUs, which are looked up later; there are not too many."""
    if len(names) > MOST_GPUS:
        raise BadValue.of_field("claim.named", f"with {len(names)} GPUs", f"at most {MOST_GPUS}")
    return tuple(names)


def notified_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the events of which the owner of a job is notified, each once."""
    try:
        return notify_events(names)
    except BadValue as error:
        refuse(error.message, error.hint)


def _memory(asked: ClaimRequest, defaults: Defaults) -> int | Share:
    asked_for = _size_or_share(asked.memory, asked.share)
    if asked_for is not None:
        return asked_for
    # An exclusive job without a size gets the whole GPU.
    return Share(Fraction(100)) if asked.exclusive else defaults.memory


def _size_or_share(size: int | None, share: float | None) -> int | Share | None:
    return size if share is None else Share(Fraction(share).limit_denominator(10_000))


def span(
    field: str,
    seconds: float | None,
    most: timedelta = LONGEST_TIME,
    least: float = 0,
    hint: str = "write a time as 90s, 30m, 4h or 1d12h",
) -> timedelta | None:
    """Return seconds as a span; None stays None."""
    if seconds is None:
        return None
    if not least <= seconds <= most.total_seconds():
        why = f"it is {least:g}s to {format_span(most)}"
        raise BadValue.of_field(field, written_span(seconds), why, hint)
    return timedelta(seconds=seconds)


def within(field: str, value: int, least: int, most: int) -> int:
    """Return `value` if it is in range."""
    if not least <= value <= most:
        raise BadValue.of_field(field, value, f"it is {least} to {most}")
    return value


def instant_of(field: str, written: str | None) -> datetime | None:
    """Return an instant that is not too far away; None stays None."""
    if written is None:
        return None
    try:
        at = datetime.fromisoformat(written)
        if at.tzinfo is None:
            raise BadValue.of_field(field, repr(written[:40]), "it has no time zone")
        at = at.astimezone(UTC)
    except (ValueError, OverflowError):
        why, example = "it is not an instant", "such as 2027-01-31T22:00:00+01:00"
        raise BadValue.of_field(field, repr(written[:40]), why, example) from None
    if at.year not in _YEARS:
        raise BadValue.of_field(field, repr(written[:40]), "it is out of range")
    return at


def size_of(asked: ClaimRequest) -> int | None:
    """Return the bytes that a job may use of a GPU; None if that depends on the GPU."""
    if asked.share_bound is not None:
        return None
    return asked.memory if asked.memory_bound is None else asked.memory_bound


def options_of(asked: WorkerOptionsRequest, memory: int | None = None) -> dict[str, object]:
    """Return how the frameworks in a job see its GPUs; `memory` is the lease, None if unknown."""
    options = asdict(asked)
    within("options.split", asked.split, 1, MOST_PARTS)
    if asked.split_sizes:
        _refuse_split(asked.split_sizes, memory)
        options["split"] = len(asked.split_sizes)
    check_counts(asked)
    return options


def _refuse_split(sizes: Sequence[int], memory: int | None) -> None:
    """Refuse parts that a lease of `memory` cannot have."""
    within("options.split_sizes", len(sizes), 1, MOST_PARTS)
    for size in sizes:
        within("options.split_sizes", size, 1, LARGEST_SIZE)
    whole = sum(sizes)
    if memory is not None and whole > memory:
        parts = ",".join(map(format_size, sizes))
        raise BadValue(
            f"cannot split a lease of {format_size(memory)} into {parts}: "
            f"together that is {format_size(whole)}",
            f"ask for smaller parts, or for --mem {format_size(round_up_size(whole))}",
        )


_WITHOUT_RETRIES = ("the job is not tried again", "add --retries 3")


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
        begin_at=instant_of("queue.begin_at", asked.begin_at),
        requeue=asked.requeue,
        preemptible=asked.preemptible,
        retries=within("queue.retries", asked.retries, 0, _MOST_RETRIES),
        retry_on=_retry_on(asked),
        retry_delay=_retry_delay(asked),
    )


def _retry_on(asked: QueueRequest) -> tuple[int, ...]:
    """Return the exit statuses after which a job is tried again."""
    if asked.retry_on and not asked.retries:
        listed = ",".join(map(str, asked.retry_on[:_MOST_RETRY_CODES]))
        raise BadValue.of_field("queue.retry_on", listed, *_WITHOUT_RETRIES)
    within("queue.retry_on", len(asked.retry_on), 0, _MOST_RETRY_CODES)
    for code in asked.retry_on:
        if not 1 <= code <= 255:
            raise BadValue.of_field(
                "queue.retry_on",
                code,
                "the exit code of a failure is 1 to 255",
                "leave out --retry-on to try again after any failure",
            )
    return tuple(dict.fromkeys(asked.retry_on))


def _retry_delay(asked: QueueRequest) -> timedelta:
    if asked.retry_delay is None:
        return FIRST_RETRY_DELAY
    if not asked.retries:
        written = written_span(asked.retry_delay)
        raise BadValue.of_field("queue.retry_delay", written, *_WITHOUT_RETRIES)
    return span("queue.retry_delay", asked.retry_delay, LONGEST_RETRY_DELAY) or timedelta(0)


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
