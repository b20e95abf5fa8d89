"""The fields that come over the wire, each checked against its bounds.

Every function raises BadValue for what cannot be what it is, and TooLarge for what is past a bound.
"""

import pwd
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from fractions import Fraction
from typing import NoReturn

from gpulease.domain.job import Owner
from gpulease.domain.lease import LONGEST_TIME, Claim
from gpulease.errors import BadValue, TooLarge
from gpulease.server.auth import Caller
from gpulease.units import Share, format_size
from gpulease.wire.requests import ClaimRequest, WorkerOptionsRequest, from_wire

LONGEST_NAME = 128
MOST_GPUS = 1024
MOST_EXEC_BYTES = 2 * 1024 * 1024
"""execve(2) takes at most a quarter of the stack limit, 2 MiB by default, with the environment."""
_LONGEST_STRING = 128 * 1024
"""MAX_ARG_STRLEN of execve(2)."""
_EXACT_SIZE = 1 << 60


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a job gets that does not say."""

    memory: int | Share
    longest_grace: timedelta = timedelta(hours=1)
    """What a job may ask for as a grace of its own."""


def refuse(why: str, hint: str | None = None) -> NoReturn:
    """Refuse a submission. Raises: BadValue, always."""
    raise BadValue(f"cannot submit: {why}", hint)


def bytes_string(what: str, text: str) -> str:
    """Return what is written one character per byte, as the operating system's string."""
    if "\0" in text:
        refuse(f"the {what} holds a NUL byte")
    if len(text) >= _LONGEST_STRING:
        raise TooLarge(
            f"cannot submit: the {what} is {format_size(len(text))} long, "
            f"and the kernel takes less than {format_size(_LONGEST_STRING)}",
            "put it in a file",
        )
    try:
        return from_wire(text)
    except UnicodeEncodeError:
        refuse(f"the {what} is not written as one character per byte")


def _variable(name: str) -> str:
    if not name or "=" in name:
        refuse(f"{name[:40]!r} cannot be the name of a variable")
    return bytes_string("name of a variable", name)


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables that are written one character per byte."""
    return {
        _variable(name): bytes_string(f"variable {printable(name[:40])}", value)
        for name, value in given.items()
    }


def refuse_more_than_exec_takes(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Check that execve(2) would take all of it."""
    size = sum(len(each) + 9 for each in argv)
    size += sum(len(name) + len(value) + 10 for name, value in environment.items())
    if size > MOST_EXEC_BYTES:
        raise TooLarge(
            f"cannot submit: arguments and environment are {format_size(size)} together, "
            f"and the kernel takes {format_size(MOST_EXEC_BYTES)}",
            "unset large variables, or put their contents in a file",
        )


def owner_of(caller: Caller) -> Owner:
    """Return the user behind a caller."""
    return Owner(caller.uid, caller.gid, user_of(caller))


def user_of(caller: Caller) -> str:
    """Return the name of the user behind a caller; one without a name is called by the uid."""
    try:
        return pwd.getpwuid(caller.uid).pw_name
    except KeyError:
        return str(caller.uid)


def checked_name(given: str) -> str:
    """Return a name that somebody chose, if listings can show it."""
    if not given.strip() or not given.isprintable() or len(given) > LONGEST_NAME:
        raise BadValue(
            f"cannot use the name {given[:40]!r}: "
            f"a name is 1 to {LONGEST_NAME} printable characters on one line",
            "leave out --name to have the job named after its command",
        )
    return given


def checked_key(given: str | None) -> str | None:
    """Return the key of a submission, if it is one."""
    if given is not None and not (given.isascii() and given.isprintable() and 0 < len(given) <= 64):
        raise BadValue(
            f"cannot use the key {given[:40]!r}: a key is 1 to 64 printable ASCII characters",
            "a random UUID does well",
        )
    return given


def printable(text: str) -> str:
    """Return `text` with nothing in it that a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def claim_of(asked: ClaimRequest, defaults: Defaults) -> Claim:
    """Return the claim that was asked for, with `defaults` for what was not said."""
    if asked.memory is not None and asked.share is not None:
        refuse("a claim is a size or a share, not both")
    if asked.gpus < 1 or asked.gpus > MOST_GPUS:
        raise BadValue(
            f"cannot lease {asked.gpus} GPUs: a job has at least one",
            "leave out --gpus for one GPU",
        )
    return Claim(
        _memory(asked, defaults),
        asked.gpus,
        asked.exclusive,
        span("time limit", asked.time_limit, at_least=1),
    )


def _memory(asked: ClaimRequest, defaults: Defaults) -> int | Share:
    if asked.share is not None:
        if not 0 < asked.share <= 100:
            refuse("a share of a GPU is above 0% and at most 100%")
        return Share(Fraction(asked.share).limit_denominator(10_000))
    if asked.memory is not None:
        return within("size", asked.memory, 1, _EXACT_SIZE)
    # Alone on a GPU, and of no size in particular: all of it.
    return Share(Fraction(100)) if asked.exclusive else defaults.memory


def span(what: str, seconds: float | None, at_least: float) -> timedelta | None:
    """Return so many seconds as a span, and None for None."""
    if seconds is None:
        return None
    if not at_least <= seconds <= LONGEST_TIME.total_seconds():
        refuse(f"the {what} is out of range", "write a time as 90s, 30m, 4h or 1d12h")
    return timedelta(seconds=seconds)


def within(what: str, value: int, least: int, most: int) -> int:
    """Return `value` if it is in range."""
    if not least <= value <= most:
        refuse(f"the {what} {value} is out of range ({least} to {most})")
    return value


def options_of(asked: WorkerOptionsRequest) -> dict[str, object]:
    """Return how the GPUs are to be presented to the frameworks."""
    options = asdict(asked)
    within("split", asked.split, 1, 64)
    for name in ("inter_op_threads", "intra_op_threads"):
        if options[name] is not None:
            within(name.replace("_", " "), options[name], 1, 4096)
    return options
