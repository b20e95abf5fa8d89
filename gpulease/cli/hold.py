"""Leases without a job: `gpulease hold` and `gpulease adopt`.

The lease of `hold` is for the shell that reads its output. The variables are printed in the syntax
of that shell, quoted so that `eval` is safe.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from functools import partial

from gpulease.cli.caller import this_process
from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.job_watch import RECONNECT_EVERY, JobWatch, current, stderr_status
from gpulease.cli.light_connection import client_or_start, light_client
from gpulease.cli.render import print_stderr, print_stdout, write_output
from gpulease.cli.request import HoldRequest, NestedRequest, build
from gpulease.cli.run_job import LockedNote
from gpulease.cli.signals import Interrupted, Killed, Signals, parent_of
from gpulease.drawing.words import clean, clock, id_of
from gpulease.errors import (
    EXIT_OWN_FAILURE,
    AlreadyLeased,
    BadUsage,
    GpuleaseError,
    NoDaemon,
    WrongState,
)
from gpulease.light_json import encode, indent
from gpulease.locations import environment
from gpulease.options import run_options
from gpulease.record import replace
from gpulease.wire.frames import FrameKind
from gpulease.wire.text import from_wire, leased, to_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from pathlib import Path
    from typing import Any, Literal

    from gpulease.client import Client
    from gpulease.client.light_client import LightClient
    from gpulease.options import RunOptions
    from gpulease.wire.jobs import EnvironmentView, JobView

    ShellSyntax = Literal["sh", "fish", "csh"]

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
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _pipe_of(pid: int | str) -> tuple[int, int] | None:
    """Return the identity of the pipe that a process has as stdout; None for anything else."""
    try:
        found = os.stat(f"/proc/{pid}/fd/1")
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISFIFO(found.st_mode) else None


def _parent_of(pid: int) -> int:
    try:
        return parent_of(pid)
    except (OSError, ValueError, IndexError):
        return _INIT


_SYNTAXES: Mapping[str, ShellSyntax] = {"fish": "fish", "csh": "csh", "tcsh": "csh"}
_LIKE_SH = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "busybox", "yash"})


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
    gone = [_UNSET[syntax].format(name) for name in unset if _is_name(name)]
    given = [
        _SET[syntax].format(name, _quoted(value, syntax))
        for name, value in new.items()
        if _is_name(name)
    ]
    return "\n".join([*gone, *given])


def _is_name(variable: str) -> bool:
    return variable.isascii() and variable.isidentifier()


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


def hold_lease(
    *,
    lasts: str | None,
    pid: int | None,
    shell: ShellSyntax | None,
    as_json: bool,
    socket: Path | str | None,
    **typed: Any,
) -> int:
    """Lease memory for this shell, print the variables for it, and return the exit code."""
    if pid is None and not as_json and sys.stdout.isatty():
        why = "its output is a terminal, where no shell reads the variables"
        hint = 'use eval "$(gpulease hold ...)", or start a shell: gpulease run --shell'
        raise BadUsage(f"cannot hold a lease for this shell: {why}", hint)
    options = replace(run_options(typed), time=lasts, pty=False)
    reader = reader_of_output()
    request = _request(options, reader, pid)
    client = client_or_start(socket, "hold")
    _refuse_inside_another(client)
    if not options.gpu and environment().get("CUDA_VISIBLE_DEVICES"):
        from gpulease.cli.messages import preset_devices

        if (text := preset_devices(environment())) is not None:
            print_stderr(text)
    written_for = shell or syntax_of(name_of(reader), environment().get("SHELL"))
    return _hold(client, request, partial(_written, as_json=as_json, shell=written_for))


def _request(options: RunOptions, reader: int, pid: int | None) -> HoldRequest:
    made = build(options, [], this_process())
    if made.notify:
        from gpulease.cli.resolved_options import completed

        made.notify = completed(made.notify)
    by_time_only = options.time is not None and pid is None
    return HoldRequest(
        environment=made.environment,
        pid=None if by_time_only else reader if pid is None else pid,
        claim=made.claim,
        options=made.options,
        name=made.name,
        wait=made.wait,
        notify=made.notify,
        adopt=pid is not None,
        key=made.key,
    )


def _refuse_inside_another(client: LightClient) -> None:
    """Refuse if this process already runs within the lease that its environment names.

    The environment alone does not decide: its variables outlive the job.
    """
    known = environment().get("GPULEASE_JOB", "")
    asked = NestedRequest(environment={"GPULEASE_JOB": to_wire(known)})
    around = client.nested(asked) if known else None
    if around is not None and around.job is not None and str(around.job.id) == known:
        hint = f"release that one first: gpulease cancel {known}"
        if around.job.kind == "run":
            hint = "gpulease run and gpulease.lease use its lease; for a second: run --new-lease"
        raise AlreadyLeased(f"cannot hold a lease here: job {known} already has one", hint)


def _hold(
    client: LightClient, request: HoldRequest, written: Callable[[JobView, EnvironmentView], bytes]
) -> int:
    stderr = stderr_status()
    with Signals() as signals:
        job = client.saying_locked(LockedNote(signals)).hold(request)
        try:
            job = JobWatch(client, signals, stderr).wait_for_start(job)
            if job.state != "active":
                from gpulease.cli.messages import last_words

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


def _environment(client: LightClient, job: JobView, signals: Signals) -> EnvironmentView:
    """Return what the lease sets, also across a restart of the daemon."""
    while True:
        try:
            return client.environment(job.id)
        except NoDaemon:
            pass
        signals.interruptible(partial(time.sleep, RECONNECT_EVERY))


def _release(client: LightClient, job: JobView) -> None:
    from gpulease.cli.follow import CANCEL_WITHIN

    try:
        client.within(CANCEL_WITHIN).cancel(job.id)
        print_stderr(f"gpulease: job {job.id} was cancelled")
    except WrongState:
        pass  # it has ended
    except GpuleaseError as error:
        print_stderr(f"gpulease: job {job.id} may still be held: {clean(error.message)}")


def _written(job: JobView, view: EnvironmentView, *, as_json: bool, shell: ShellSyntax) -> bytes:
    new = {from_wire(name): from_wire(value) for name, value in vars(view.set).items()}
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


def adopt_process(
    *,
    pid: int,
    mem: str | None,
    lasts: str | None,
    name: str | None,
    as_json: bool,
    socket: Path | str | None,
) -> None:
    """Lease the memory that a process uses, and print the lease."""
    from gpulease.client import checked
    from gpulease.units import Share, parse_memory, parse_span
    from gpulease.wire.requests import AdoptRequest, ClaimRequest

    memory = None if mem is None else parse_memory(mem)
    claim = ClaimRequest(
        memory=None if isinstance(memory, Share) else memory,
        share=float(memory.percent) if isinstance(memory, Share) else None,
        time_limit=None if lasts is None else parse_span(lasts).total_seconds(),
    )
    client = checked(light_client(socket, "adopt").transport)
    job = client.adopt(AdoptRequest(pid, claim, name))
    from gpulease.client import encode as encode_view

    print_stdout(indent(encode_view(job)) if as_json else adopted(client, job, pid))
    for event in client.job(job.id).events:
        if event.kind == "notice" and not as_json:
            print_stderr(f"gpulease: {clean(event.detail or '')}")


def adopted(client: Client, job: JobView, pid: int) -> str:
    """Describe the lease of a process that was adopted."""
    from datetime import timedelta

    from gpulease.drawing.words import labels_of, size
    from gpulease.units import format_span

    labels = labels_of(client.status(queue=0).gpus)
    leases = [f"{size(each.memory)} of GPU {labels.get(each.gpu, each.gpu)}" for each in job.leases]
    ends = f"until process {pid} ends"
    if job.claim.time_limit is not None:
        ends += f", for at most {format_span(timedelta(seconds=job.claim.time_limit))}"
    return f"job {id_of(job)} of {clean(job.user)} holds {' and '.join(leases)} {ends}"
