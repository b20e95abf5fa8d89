"""A submission as it came over the wire, checked against every bound, as an order for a job.

Nothing here looks at the machine; that a claim can be met is the business of the queue.
"""

import pwd
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import PurePosixPath
from typing import NoReturn

from gpulease.domain.claim import Claim
from gpulease.domain.job import Invocation, Owner
from gpulease.errors import BadValue, TooLarge
from gpulease.server.peer import Caller
from gpulease.service.ports import Order
from gpulease.units import Share, format_size
from gpulease.wire import ClaimRequest, SubmitRequest, from_wire

LONGEST_NAME = 128
LONGEST_COMMAND = 4096
"""Characters of the command line that are kept to be shown; what is executed is never cut."""
MOST_GPUS = 1024
MOST_EXEC_BYTES = 2 * 1024 * 1024
"""execve(2) takes at most a quarter of the stack limit, 2 MiB by default, with the environment."""
_LONGEST_STRING = 128 * 1024
"""MAX_ARG_STRLEN of execve(2)."""
_LONGEST_PATH = 4096
_LONGEST_SPAN_S = 3650 * 86400.0
_EXACT_SIZE = 1 << 60


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a job gets that does not say."""

    memory: int | Share


def order_of(request: SubmitRequest, caller: Caller, defaults: Defaults) -> Order:
    """Return what `caller` asks for.

    Raises:
        BadValue: a field cannot be what it is.
        TooLarge: a field is past its bound.
    """
    argv = tuple(_bytes_string("argument", each) for each in request.argv)
    if not argv or not argv[0]:
        raise BadValue("cannot run nothing: there is no command", "gpulease run COMMAND...")
    environment = {
        _variable(name): _bytes_string(f"variable {name[:40]}", value)
        for name, value in request.environment.items()
    }
    _refuse_more_than_exec_takes(argv, environment)
    return Order(
        owner=_owner(caller),
        name=_name(request.name, argv),
        command=_shown(argv),
        claim=_claim(request.claim, defaults),
        invocation=Invocation(
            argv=argv,
            cwd=_directory(request.cwd),
            environment=environment,
            umask=_within("umask", request.umask, 0, 0o777),
            soft_limits=_soft_limits(request.soft_limits),
            nice=_within("nice level", request.nice, -20, 19),
            attached=request.attached,
            options=_options(request),
        ),
        wait_for=_span("time to wait", request.wait, at_least=0),
    )


def _refuse(why: str, hint: str | None = None) -> NoReturn:
    raise BadValue(f"cannot submit: {why}", hint)


def _bytes_string(what: str, text: str) -> str:
    if "\0" in text:
        _refuse(f"the {what} holds a NUL byte")
    if len(text) >= _LONGEST_STRING:
        raise TooLarge(
            f"cannot submit: the {what} is {format_size(len(text))} long, "
            f"and the kernel takes less than {format_size(_LONGEST_STRING)}",
            "put it in a file",
        )
    try:
        return from_wire(text)
    except UnicodeEncodeError:
        _refuse(f"the {what} is not written as one character per byte")


def _variable(name: str) -> str:
    if not name or "=" in name:
        _refuse(f"{name[:40]!r} cannot be the name of a variable")
    return _bytes_string("name of a variable", name)


def _refuse_more_than_exec_takes(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    size = sum(len(each) + 9 for each in argv)
    size += sum(len(name) + len(value) + 10 for name, value in environment.items())
    if size > MOST_EXEC_BYTES:
        raise TooLarge(
            f"cannot submit: arguments and environment are {format_size(size)} together, "
            f"and the kernel takes {format_size(MOST_EXEC_BYTES)}",
            "unset large variables, or put their contents in a file",
        )


def _owner(caller: Caller) -> Owner:
    try:
        user = pwd.getpwuid(caller.uid).pw_name
    except KeyError:
        user = str(caller.uid)
    return Owner(caller.uid, caller.gid, user)


def _name(given: str | None, argv: tuple[str, ...]) -> str:
    if given is None:
        return _default_name(argv)
    if not given.strip() or not given.isprintable() or len(given) > LONGEST_NAME:
        raise BadValue(
            f"cannot use the name {given[:40]!r}: "
            f"a name is 1 to {LONGEST_NAME} printable characters on one line",
            "leave out --name to have the job named after its command",
        )
    return given


def _default_name(argv: tuple[str, ...]) -> str:
    """Name a job after its script, or else after its command."""
    script = next((each for each in argv[1:] if not each.startswith("-")), "")
    named_after = script if script.endswith((".py", ".sh")) else argv[0]
    return _printable(PurePosixPath(named_after).name or argv[0])[:LONGEST_NAME]


def _shown(argv: tuple[str, ...]) -> str:
    shown = ""
    for each in argv:
        shown += ("" if not shown else " ") + shlex.quote(each[:LONGEST_COMMAND])
        if len(shown) > LONGEST_COMMAND:
            shown = shown[: LONGEST_COMMAND - 3] + "..."
            break
    return _printable(shown)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _claim(asked: ClaimRequest, defaults: Defaults) -> Claim:
    if asked.memory is not None and asked.share is not None:
        _refuse("a claim is a size or a share, not both")
    if asked.gpus < 1 or asked.gpus > MOST_GPUS:
        raise BadValue(
            f"cannot lease {asked.gpus} GPUs: a job has at least one",
            "leave out --gpus for one GPU",
        )
    return Claim(
        _memory(asked, defaults),
        asked.gpus,
        asked.exclusive,
        _span("time limit", asked.time_limit, at_least=1),
    )


def _memory(asked: ClaimRequest, defaults: Defaults) -> int | Share:
    if asked.share is not None:
        if not 0 < asked.share <= 100:
            _refuse("a share of a GPU is above 0% and at most 100%")
        return Share(Fraction(asked.share).limit_denominator(10_000))
    if asked.memory is not None:
        return _within("size", asked.memory, 1, _EXACT_SIZE)
    # Alone on a GPU, and of no size in particular: all of it.
    return Share(Fraction(100)) if asked.exclusive else defaults.memory


def _span(what: str, seconds: float | None, at_least: float) -> timedelta | None:
    if seconds is None:
        return None
    if not at_least <= seconds <= _LONGEST_SPAN_S:
        _refuse(f"the {what} is out of range", "write a time as 90s, 30m, 4h or 1d12h")
    return timedelta(seconds=seconds)


def _directory(path: str) -> str:
    directory = _bytes_string("working directory", path)
    if not directory.startswith("/") or len(path) > _LONGEST_PATH:
        _refuse("the working directory is not an absolute path")
    return directory


def _soft_limits(given: Mapping[str, int]) -> Mapping[str, int]:
    for name, value in given.items():
        if not name.startswith("RLIMIT_") or not name.isascii() or len(name) > 32:
            _refuse(f"{name[:40]!r} is no resource limit")
        _within(name, value, -1, (1 << 63) - 1)
    return given


def _within(what: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        _refuse(f"the {what} {value} is out of range ({least} to {most})")
    return value


def _options(request: SubmitRequest) -> dict[str, object]:
    options = asdict(request.options)
    _within("split", request.options.split, 1, 64)
    for name in ("inter_op_threads", "intra_op_threads"):
        if options[name] is not None:
            _within(name.replace("_", " "), options[name], 1, 4096)
    return options
