"""Leases without a job: `gpulease hold` and `gpulease adopt`.

The lease of `hold` is for the shell that reads its output. The variables are printed in the syntax
of that shell, quoted so that `eval` is safe.
"""

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpulease.cli.caller import this_process
from gpulease.cli.connect import SocketOption, connect, connect_or_start, started_message
from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.follow import CANCEL_WITHIN
from gpulease.cli.job_watch import RECONNECT_EVERY, current, stderr_status, wait_for_start
from gpulease.cli.messages import last_words, preset_devices
from gpulease.cli.options import takes_option, takes_options_of_hold
from gpulease.cli.render import print_stderr, print_stdout, write_output
from gpulease.cli.request import build
from gpulease.cli.resolved_options import completed
from gpulease.cli.run_job import LockedNote
from gpulease.cli.signals import Interrupted, Killed, Signals, parent_of
from gpulease.client import Client, encode
from gpulease.drawing.words import clean, clock, id_of, labels_of, size
from gpulease.errors import (
    EXIT_OWN_FAILURE,
    AlreadyLeased,
    BadUsage,
    GpuleaseError,
    NoDaemon,
    WrongState,
)
from gpulease.light_json import indent
from gpulease.locations import environment
from gpulease.options import RunOptions, run_options
from gpulease.record import replace
from gpulease.units import Share, format_span, parse_memory, parse_span
from gpulease.wire.frames import FrameKind
from gpulease.wire.jobs import EnvironmentView, JobView
from gpulease.wire.requests import (
    AdoptRequest,
    ClaimRequest,
    HoldRequest,
    NestedRequest,
    from_wire,
    to_wire,
)
from gpulease.wire.text import leased

_INIT = 1


def reader_of_output() -> int:
    """Return the shell that reads our output, or else our parent.

    In `eval "$(gpulease hold)"` our parent may be a copy of the shell that ends with us. Whatever
    runs inside the brackets writes to the same pipe as we do; the shell outside does not.
    """
    here = _pipe_of("self")
    pid = os.getppid()
    while pid > _INIT and here is not None and _pipe_of(pid) == here:
        pid = _parent_of(pid)
    return pid if pid > _INIT else os.getppid()


def name_of(pid: int) -> str | None:
    """Return the name of the program of a process, such as bash; None if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _pipe_of(pid: int | str) -> tuple[int, int] | None:
    """Return the identity of the pipe that a process has as stdout; None for anything else."""
    with suppress(OSError):
        found = Path(f"/proc/{pid}/fd/1").stat()
        if stat.S_ISFIFO(found.st_mode):
            return found.st_dev, found.st_ino
    return None


def _parent_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return parent_of(pid)
    return _INIT


ShellSyntax = Literal["sh", "fish", "csh"]

_SYNTAXES: Mapping[str, ShellSyntax] = {"fish": "fish", "csh": "csh", "tcsh": "csh"}
_LIKE_SH = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "busybox", "yash"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def syntax_of(program: str | None, login_shell: str | None) -> ShellSyntax:
    """Return the syntax of a shell by its name, or else by that of $SHELL."""
    for path in (program, login_shell):
        # A login shell calls itself -bash.
        name = (path or "").rpartition("/")[2].removeprefix("-")
        if name in _SYNTAXES:
            return _SYNTAXES[name]
        if name in _LIKE_SH:
            return "sh"
    return "sh"


def statements(new: Mapping[str, str], unset: Iterable[str], syntax: ShellSyntax) -> str:
    """Return the lines that set and unset variables; each ends in a semicolon.

    Names that shells do not accept are left out.
    """
    gone = [_UNSET[syntax].format(name) for name in unset if _NAME.fullmatch(name)]
    given = [
        _SET[syntax].format(name, _quoted(value, syntax))
        for name, value in new.items()
        if _NAME.fullmatch(name)
    ]
    return "\n".join([*gone, *given])


_SET: Mapping[ShellSyntax, str] = {
    "sh": "export {}={};",
    "fish": "set -gx {} {};",
    "csh": "setenv {} {};",
}
_UNSET: Mapping[ShellSyntax, str] = {"sh": "unset {};", "fish": "set -e {};", "csh": "unsetenv {};"}


def _quoted(value: str, syntax: ShellSyntax) -> str:
    match syntax:
        case "fish":
            inside = value.replace("\\", "\\\\").replace("'", "\\'")
        case "csh":
            # csh expands history inside quotes as well, and does not allow a bare line break.
            inside = value.replace("'", "'\\''").replace("!", "\\!").replace("\n", "\\\n")
        case "sh":
            inside = value.replace("'", "'\\''")
    return f"'{inside}'"


@takes_options_of_hold
def hold(
    ctx: typer.Context,
    *,
    lasts: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="SPAN",
            help="Release after this time: 90s, 30m, 4h.",
            rich_help_panel="Resources",
        ),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            "--pid",
            metavar="PID",
            help="Hold until this process ends.",
            rich_help_panel="Resources",
        ),
    ] = None,
    shell: Annotated[
        Literal["sh", "fish", "csh"] | None,
        typer.Option("--shell", help="The syntax to print; default: your shell's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lease as JSON.")] = False,
    socket: SocketOption = None,
    **typed: Any,
) -> int:
    """Lease GPU memory for this shell, and print the variables that put it into effect.

    It waits in the queue as run does. The lease ends with the shell, with the
    process of --pid, or after --for. In a notebook, use gpulease.lease. If the
    process of --pid uses GPUs already, it gets a lease on these, at once or not at all.

    \b
    Examples:
      eval "$(gpulease hold --mem 4G)"
      eval "$(gpulease hold --mem 8G --gpus 2 --for 2h)"
      gpulease hold --mem 4G | source               (fish)
      gpulease cancel $GPULEASE_JOB                 (releases it)

    \b
    Exit code: 0, or
        2  an option or its value is wrong
       75  gave up waiting (--no-wait, --wait)
      125  gpulease failed, or the daemon refused the request
      130  Ctrl-C
    """
    if pid is None and not as_json and sys.stdout.isatty():
        why = "its output is a terminal, where no shell reads the variables"
        hint = 'use eval "$(gpulease hold ...)", or start a shell: gpulease run --shell'
        raise BadUsage(f"cannot hold a lease for this shell: {why}", hint)
    options = replace(run_options(typed), time=lasts, pty=False)
    reader = reader_of_output()
    request = _request(options, reader, pid)
    client, started = connect_or_start(ctx, socket)
    if started:
        print_stderr(started_message(client))
    _refuse_inside_another(client)
    if not options.gpu and (text := preset_devices(environment())) is not None:
        print_stderr(text)
    written_for = shell or syntax_of(name_of(reader), environment().get("SHELL"))
    return _hold(client, request, partial(_written, as_json=as_json, shell=written_for))


def _request(options: RunOptions, reader: int, pid: int | None) -> HoldRequest:
    made = build(options, [], this_process())
    by_time_only = options.time is not None and pid is None
    return HoldRequest(
        environment=made.environment,
        pid=None if by_time_only else pid or reader,
        claim=made.claim,
        options=made.options,
        name=made.name,
        wait=made.wait,
        notify=completed(made.notify) if made.notify else [],
        adopt=pid is not None,
    )


def _refuse_inside_another(client: Client) -> None:
    """Refuse if this process already runs within the lease that its environment names.

    The environment alone does not decide: its variables outlive the job.
    """
    known = environment().get("GPULEASE_JOB", "")
    around = client.nested(NestedRequest({"GPULEASE_JOB": to_wire(known)})) if known else None
    if around is not None and around.job is not None and str(around.job.id) == known:
        hint = f"release that one first: gpulease cancel {known}"
        if around.job.kind == "run":
            hint = "gpulease run and gpulease.lease use its lease; for a second: run --new-lease"
        raise AlreadyLeased(f"cannot hold a lease here: job {known} already has one", hint)


def _hold(
    client: Client, request: HoldRequest, written: Callable[[JobView, EnvironmentView], bytes]
) -> int:
    stderr = stderr_status()
    with Signals() as signals:
        job = client.saying_locked(LockedNote(signals)).hold(request)
        try:
            job = wait_for_start(client, job, signals, stderr)
            if job.state != "active":
                ended = f"gpulease: job {job.id} ended before its lease was granted"
                print_stderr(last_words(job) or ended)
                return status_of_job(job) or EXIT_OWN_FAILURE
            view = _environment(client, job, signals)
            # Byte for byte: a variable may contain bytes that are no text.
            write_output(FrameKind.STDOUT, written(current(client, job), view))
        except Interrupted as interrupted:
            stderr.line.clear()
            _release(client, job)
            raise Killed(interrupted.signum) from None
        except BaseException:
            # Nobody knows of the lease yet, so nobody else would release it.
            _release(client, job)
            raise
    print_stderr(_held(job, stderr.now()))
    return 0


def _environment(client: Client, job: JobView, signals: Signals) -> EnvironmentView:
    """Return what the lease sets, also across a restart of the daemon."""
    while True:
        with suppress(NoDaemon):
            return client.environment(job.id)
        signals.interruptible(partial(time.sleep, RECONNECT_EVERY))


def _release(client: Client, job: JobView) -> None:
    try:
        with suppress(WrongState):  # it has ended
            client.within(CANCEL_WITHIN).cancel(job.id)
            print_stderr(f"gpulease: job {job.id} was cancelled")
    except GpuleaseError as error:
        print_stderr(f"gpulease: job {job.id} may still be held: {clean(error.message)}")


def _written(job: JobView, view: EnvironmentView, *, as_json: bool, shell: ShellSyntax) -> bytes:
    new = {from_wire(name): from_wire(value) for name, value in view.set.items()}
    unset = [from_wire(name) for name in view.unset]
    if not as_json and job.adopted:
        # The process already runs, so the variables have no use.
        return b""
    if not as_json:
        return os.fsencode(statements(new, unset, shell) + "\n")
    readable = {_as_text(name): _as_text(value) for name, value in new.items()}
    shown = {"job": job, "set": readable, "unset": [_as_text(name) for name in unset]}
    return indent(encode(shown)).encode() + b"\n"


def _as_text(value: str) -> str:
    """Return a variable as text that JSON can contain."""
    return os.fsencode(value).decode(errors="replace")


def _held(job: JobView, now: datetime) -> str:
    sizes = {leased(lease): None for lease in job.leases}
    memory = " and ".join(sizes)
    count = len(job.leases)
    where = "1 GPU" if count == 1 else f"{'each of ' if len(sizes) == 1 else ''}{count} GPUs"
    name = name_of(job.pid) if job.pid else None
    called = f" ({clean(name)})" if name else ""
    ends = [f"until process {job.pid}{called} ends"] if job.pid else []
    if job.expires_at is not None:
        ends.append(f"{'at the latest ' if ends else ''}until {clock(job.expires_at, now)}")
    return f"gpulease: job {job.id} holds {memory} on {where} {', '.join(ends)}"


@takes_option("name")
def adopt(
    ctx: typer.Context,
    pid: Annotated[
        int, typer.Argument(metavar="PID", help="The process; those below it count as well.")
    ],
    mem: Annotated[
        str | None,
        typer.Option("--mem", metavar="SIZE", help="More than it holds now, on each of its GPUs."),
    ] = None,
    lasts: Annotated[
        str | None,
        typer.Option("--for", "--time", metavar="SPAN", help="Release after this time."),
    ] = None,
    name: str | None = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lease as JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """Lease the memory that a process already uses. Admins may name any process.

    For a process that was started without gpulease. The lease is on the GPUs that the
    process uses, for what it holds there, and ends with the process. It belongs to
    the user of the process. It is granted at once, or refused.

    \b
    Examples:
      gpulease adopt 4711
      gpulease adopt 4711 --mem 40G --for 8h

    \b
    Exit code: 0, or
        2  an option or its value is wrong
       75  it does not fit beside other leases
      125  gpulease failed, or the daemon refused the request
    """
    memory = None if mem is None else parse_memory(mem)
    claim = ClaimRequest(
        memory=None if isinstance(memory, Share) else memory,
        share=float(memory.percent) if isinstance(memory, Share) else None,
        time_limit=None if lasts is None else parse_span(lasts).total_seconds(),
    )
    client = connect(ctx, socket)
    job = client.adopt(AdoptRequest(pid, claim, name))
    print_stdout(indent(encode(job)) if as_json else adopted(client, job, pid))
    for event in client.job(job.id).events:
        if event.kind == "notice" and not as_json:
            print_stderr(f"gpulease: {clean(event.detail or '')}")


def adopted(client: Client, job: JobView, pid: int) -> str:
    """Describe the lease of a process that was adopted."""
    labels = labels_of(client.status(queue=0).gpus)
    leases = [f"{size(each.memory)} of GPU {labels.get(each.gpu, each.gpu)}" for each in job.leases]
    ends = f"until process {pid} ends"
    if job.claim.time_limit is not None:
        ends += f", for at most {format_span(timedelta(seconds=job.claim.time_limit))}"
    return f"job {id_of(job)} of {clean(job.user)} holds {' and '.join(leases)} {ends}"
