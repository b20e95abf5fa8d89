"""The request that the options of `run` make, for the process that calls.

Only limits of the kernel are looked up here: the same options give the same request.
"""

from __future__ import annotations

import os

from gpulease.client.transport import new_key
from gpulease.errors import BadValue, TooLarge
from gpulease.light_json import Namespace
from gpulease.record import record
from gpulease.units import Share, format_size, parse_memory, parse_size, parse_span, parse_split
from gpulease.wire.text import (
    LARGEST_EXEC,
    LARGEST_RETRY,
    LARGEST_STRING,
    LONGEST_NAME,
    exec_size,
    to_wire,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from gpulease.cli.caller import Caller, Streams
    from gpulease.wire.requests import (
        ClaimRequest,
        EarlySignalRequest,
        QueueRequest,
        SubmitRequest,
        TerminalRequest,
        WorkerOptionsRequest,
    )
else:

    def _request(**fields):
        return Namespace(fields)

    # Without the shapes, which are dataclasses. The daemon has their defaults.
    ClaimRequest = EarlySignalRequest = QueueRequest = SubmitRequest = _request
    TerminalRequest = WorkerOptionsRequest = _request

DEFAULT_WINDOW = (24, 80)
"""Rows and columns of a terminal to which nobody has attached yet."""
_FACTOR = r"(\d{1,2}(?:\.\d{1,6})?) *[xX]?"
_RESERVED = 8 * 1024
"""Bytes for the variables that gpulease adds to those of the caller."""
_SHOWN = 3


@record(frozen=True)
class RunOptions:
    """The options of `run` as they were typed, by the names of its parameters."""

    mem: str | None = None
    gpus: int | None = None
    """None: as many as `gpu` names, or else one."""
    gpu: Sequence[str] = ()
    """GPUs by index, UUID or the beginning of a UUID, also several with commas: "1,3"."""
    gpu_model: str | None = None
    min_vram: str | None = None
    same_model: bool = False
    exclusive: bool = False
    time: str | None = None
    name: str | None = None
    wait: str | None = None
    no_wait: bool = False
    detach: bool = False
    early_signal: str | None = None
    grace: str | None = None
    end_with_command: bool = False
    retry_oom: str | None = None
    array: str | None = None
    after: Sequence[str] = ()
    begin: str | None = None
    held: bool = False
    requeue: bool = False
    preemptible: bool = False
    priority: Literal["low", "normal", "high"] = "normal"
    nice: int = 0
    slurm: Sequence[str] = ()
    notify: Sequence[str] = ()
    """Events, also several with commas: "end,oom"."""
    snapshot: bool = False
    verbose: bool = False
    summary: bool = False
    shell: bool = False
    pty: bool | None = None
    """None: with a terminal if this command has one."""
    visible: Literal["uuid", "index"] = "uuid"
    growth: bool = False
    split: str | None = None
    processes: int | None = None
    deterministic: bool = False
    omp_threads: int | None = None
    inter_op_threads: int | None = None
    intra_op_threads: int | None = None
    soft_placement: bool = False
    log_placement: bool = False
    strict: bool = False
    new_lease: bool = False
    dry: bool = False
    json: bool = False
    detach_keys: str | None = None


def build(options: RunOptions, argv: Sequence[str], caller: Caller) -> SubmitRequest:
    """Return the request to run `argv` with `options` as `caller`.

    Raises:
        BadValue: an option has an impossible value.
        TooLarge: the kernel would not execute the command.
    """
    refuse_what_execve_would(argv, caller.environment)
    return SubmitRequest(
        argv=[to_wire(argument) for argument in argv],
        cwd=to_wire(caller.cwd),
        environment={to_wire(key): to_wire(value) for key, value in caller.environment.items()},
        umask=caller.umask,
        soft_limits=dict(caller.soft_limits),
        nice=caller.nice,
        claim=_claim(options),
        options=_worker_options(options),
        name=_name(options.name),
        attached=not options.detach,
        ends_with_client=options.end_with_command,
        wait=_wait(options),
        terminal=_terminal(options, caller.streams),
        early_signal=_early_signal(options),
        grace=None if options.grace is None else parse_span(options.grace).total_seconds(),
        retry_oom=_retry(options.retry_oom),
        queue=_queue(options),
        notify=listed_events(options.notify),
        key=new_key(),
    )


def _claim(options: RunOptions) -> ClaimRequest:
    named = gpu_names(options.gpu)
    gpus = len(named) or 1 if options.gpus is None else options.gpus
    if gpus < 1:
        raise BadValue(
            f"cannot lease {gpus} GPUs: a lease has at least one",
            "run a command that needs no GPU without gpulease",
        )
    memory = None if options.mem is None else parse_memory(options.mem)
    return ClaimRequest(
        memory=None if isinstance(memory, Share) else memory,
        share=float(memory.percent) if isinstance(memory, Share) else None,
        gpus=gpus,
        exclusive=options.exclusive,
        time_limit=None if options.time is None else parse_span(options.time).total_seconds(),
        named=named,
        model=options.gpu_model,
        min_vram=None if options.min_vram is None else parse_size(options.min_vram),
        same_model=options.same_model,
    )


def gpu_names(given: Sequence[str]) -> list[str]:
    """Return the names of GPUs in --gpu 1,3 --gpu GPU-5f3a, each once.

    Raises:
        BadValue: one is empty.
    """
    names = [name.strip() for each in given for name in each.split(",")]
    if not all(names):
        raise BadValue(
            "cannot use --gpu: a GPU is missing", "such as --gpu 1,3; gpulease status shows them"
        )
    return list(dict.fromkeys(names))


def listed_events(given: Sequence[str]) -> list[str]:
    """Return the events in --notify start,end --notify oom; none with --notify none."""
    events = [event.strip() for each in given for event in each.split(",")]
    return [] if "none" in events else events


def _queue(options: RunOptions) -> QueueRequest:
    return QueueRequest(
        priority=options.priority,
        nice=options.nice,
        held=options.held,
        array=options.array,
        begin_at=None,
        after=[],
        requeue=options.requeue,
        preemptible=options.preemptible,
    )


def _worker_options(options: RunOptions) -> WorkerOptionsRequest:
    for flag, count in (
        ("--processes", options.processes),
        ("--omp-threads", options.omp_threads),
        ("--inter-op-threads", options.inter_op_threads),
        ("--intra-op-threads", options.intra_op_threads),
    ):
        if count is not None and count < 1:
            raise BadValue(f"cannot use {flag} {count}: the least is 1")
    split, sizes = (1, []) if options.split is None else parse_split(options.split)
    return WorkerOptionsRequest(
        visible=options.visible,
        growth=options.growth,
        split=split,
        split_sizes=sizes,
        processes=options.processes,
        deterministic=options.deterministic,
        omp_threads=options.omp_threads,
        inter_op_threads=options.inter_op_threads,
        intra_op_threads=options.intra_op_threads,
        log_placement=options.log_placement,
        soft_placement=options.soft_placement,
        strict=options.strict,
    )


def _name(name: str | None) -> str | None:
    if name is None:
        return None
    if not name.strip() or not name.isprintable():
        raise BadValue(
            "cannot use this name: it is empty, or contains a line break or control character",
            "use one line of text, such as --name resnet-50",
        )
    if len(name) > LONGEST_NAME:
        raise BadValue(
            f"cannot use this name: it has {len(name)} characters",
            f"use at most {LONGEST_NAME}",
        )
    return name


def _retry(factor: str | None) -> float | None:
    if factor is None:
        return None
    import re

    found = re.fullmatch(_FACTOR, factor.strip(), re.ASCII)
    if found is None or not 1 < float(found.group(1)) <= LARGEST_RETRY:
        raise BadValue(
            f"cannot use --retry-oom {factor[:40]}: the factor must be above 1 "
            f"and at most {LARGEST_RETRY:g}",
            "for 50% more memory at each retry: --retry-oom 1.5x",
        )
    return float(found.group(1))


def _wait(options: RunOptions) -> float | None:
    if options.no_wait and options.wait is not None:
        raise BadValue(
            "cannot use --wait and --no-wait together: they exclude each other",
            "--no-wait gives up at once, --wait 30m after half an hour; without both, jobs wait "
            "until they start",
        )
    if options.no_wait:
        return 0.0
    return None if options.wait is None else parse_span(options.wait).total_seconds()


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
    number, ahead = _signal_number(name), parse_span(before)
    if options.time is None:
        raise BadValue(
            "cannot use --signal without --time: the job has no time limit",
            "add a time limit, such as --time 4h",
        )
    if ahead >= parse_span(options.time):
        raise BadValue(
            f"cannot use --signal {options.early_signal}: the time limit is only {options.time}",
            "after the @ stands how long before the time limit the signal is sent",
        )
    return EarlySignalRequest(signal=number, before=ahead.total_seconds())


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
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise BadValue(
            f"cannot use --signal {name}: no program can catch it",
            "use a signal that the program handles, such as USR1",
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
