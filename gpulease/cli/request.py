"""The request that the options of `run` make, for the process that calls.

Only limits of the kernel are looked up here: the same options give the same request.
"""

from __future__ import annotations

import os

from gpulease.client.transport import new_key
from gpulease.errors import BadValue, TooLarge
from gpulease.light_json import Namespace
from gpulease.options import RunOptions, read_fields
from gpulease.units import format_size, parse_span
from gpulease.wire.text import LARGEST_EXEC, LARGEST_STRING, exec_size, to_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpulease.cli.caller import Caller, Streams
    from gpulease.wire.requests import ClaimRequest as ClaimRequest
    from gpulease.wire.requests import EarlySignalRequest as EarlySignalRequest
    from gpulease.wire.requests import EditRequest as EditRequest
    from gpulease.wire.requests import HoldRequest as HoldRequest
    from gpulease.wire.requests import NestedRequest as NestedRequest
    from gpulease.wire.requests import QueueRequest as QueueRequest
    from gpulease.wire.requests import ReserveRequest as ReserveRequest
    from gpulease.wire.requests import SubmitRequest as SubmitRequest
    from gpulease.wire.requests import TerminalRequest as TerminalRequest
    from gpulease.wire.requests import WorkerOptionsRequest as WorkerOptionsRequest
else:

    def _request(**fields):
        return Namespace(fields)

    # Without the shapes, which are dataclasses. The daemon has their defaults.
    ClaimRequest = EarlySignalRequest = QueueRequest = SubmitRequest = _request
    TerminalRequest = WorkerOptionsRequest = _request
    EditRequest = HoldRequest = NestedRequest = ReserveRequest = _request

DEFAULT_WINDOW = (24, 80)
"""Rows and columns of a terminal to which nobody has attached yet."""
_RESERVED = 8 * 1024
"""Bytes for the variables that gpulease adds to those of the caller."""
_SHOWN = 3


def build(options: RunOptions, argv: Sequence[str], caller: Caller) -> SubmitRequest:
    """Return the request to run `argv` with `options` as `caller`.

    Raises:
        BadValue: an option has an impossible value.
        TooLarge: the kernel would not execute the command.
    """
    refuse_what_execve_would(argv, caller.environment)
    fields = read_fields(vars(options))
    claim = fields["claim"]
    if options.gpus is None:
        claim["gpus"] = len(claim["named"]) or 1
    whole = fields[""]
    whole |= {"wait": _wait(options, whole["wait"]), "early_signal": _early_signal(options)}
    whole["grid"] = {name: list(map(to_wire, each)) for name, each in whole["grid"].items()}
    # For these the clock and the daemon's list of jobs are needed, see run_job.
    fields["queue"] |= {"begin_at": None, "after": []}
    return SubmitRequest(
        argv=[to_wire(argument) for argument in argv],
        cwd=to_wire(caller.cwd),
        environment={to_wire(key): to_wire(value) for key, value in caller.environment.items()},
        umask=caller.umask,
        soft_limits=dict(caller.soft_limits),
        nice=caller.nice,
        claim=ClaimRequest(**claim),
        options=WorkerOptionsRequest(**fields["options"]),
        queue=QueueRequest(**fields["queue"]),
        attached=not options.detach,
        terminal=_terminal(options, caller.streams),
        key=new_key(),
        **whole,
    )


def _wait(options: RunOptions, wait: float | None) -> float | None:
    if options.no_wait and options.wait is not None:
        raise BadValue(
            "cannot use --wait and --no-wait together: they exclude each other",
            "--no-wait gives up at once, --wait 30m after half an hour; without both, jobs wait "
            "until they start",
        )
    return 0.0 if options.no_wait else wait


def _terminal(options: RunOptions, streams: Streams) -> TerminalRequest | None:
    here = streams.stdin and streams.stdout and not options.detach
    wanted = here if options.pty is None else options.pty
    if options.shell and not wanted:
        raise BadValue(
            "cannot start a shell: standard input and output are no terminal",
            "run it on a terminal, or use --pty and gpulease attach",
        )
    if not wanted:
        return None
    rows, columns = streams.size or DEFAULT_WINDOW
    return TerminalRequest(
        rows=rows,
        columns=columns,
        attributes=None if streams.attributes is None else list(streams.attributes),
        stderr=options.detach or streams.stderr,
    )


def _early_signal(options: RunOptions) -> EarlySignalRequest | None:
    if options.early_signal is None:
        return None
    name, given, before = options.early_signal.partition("@")
    if not given:
        raise BadValue(
            f"cannot use --signal {name}: the time before the end is missing",
            f"for two minutes before the end: --signal {name}@2m",
        )
    return EarlySignalRequest(
        signal=_signal_number(name), before=parse_span(before).total_seconds()
    )


def _signal_number(name: str) -> int:
    import signal

    bare = name.strip().upper().removeprefix("SIG")
    known = {each.name.removeprefix("SIG"): int(each) for each in signal.Signals}
    number = int(bare) if bare.isascii() and bare.isdigit() else known.get(bare, 0)
    if number not in signal.valid_signals():
        raise BadValue(
            f"cannot use --signal {name!r}: no such signal",
            "write it as USR1@2m; kill -l lists the names",
        )
    return number


def refuse_what_execve_would(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the sizes that execve(2) checks, before the job is queued.

    Raises:
        TooLarge: an argument, a variable, or all together exceed a limit of the kernel.
    """
    for number, argument in enumerate(argv):
        if (size := len(os.fsencode(argument)) + 1) > LARGEST_STRING:
            raise _string_too_large(f"argument {number} has", size)
    sizes = {key: len(os.fsencode(f"{key}={value}")) + 1 for key, value in environment.items()}
    for key, size in sizes.items():
        if size > LARGEST_STRING:
            raise _string_too_large(f"the environment variable {key} has", size)
    whole = exec_size(argv, environment)
    limit = min(os.sysconf("SC_ARG_MAX"), LARGEST_EXEC) - _RESERVED
    if whole > limit:
        raise _all_too_large(whole, limit, sizes)


def _string_too_large(what: str, size: int) -> TooLarge:
    return TooLarge(
        f"cannot run the command: {what} {_kib(size)}, and the kernel accepts at most "
        f"{format_size(LARGEST_STRING)}",
        "pass the value in a file",
    )


def _all_too_large(whole: int, limit: int, sizes: Mapping[str, int]) -> TooLarge:
    biggest = sorted(sizes, key=lambda key: -sizes[key])[:_SHOWN]
    named = ", ".join(f"{key} ({_kib(sizes[key])})" for key in biggest)
    return TooLarge(
        f"cannot run the command: its arguments and environment have {_kib(whole)}, and the "
        f"kernel accepts at most {_kib(limit)}; the largest variables: {named}",
        "unset variables that the job does not need: env -u NAME gpulease run ...",
    )


def _kib(size: int) -> str:
    return f"{-(-size // 1024)}K"
