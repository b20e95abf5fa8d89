"""`gpulease hold`: a lease for a shell, a notebook or any process, with no job to run.

Which process a lease without a job is for: the shell that will read what `hold` prints.

Setting and unsetting variables in the languages of shells, quoted so that `eval` is safe.
"""

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpulease.cli.caller import environment, this_process
from gpulease.cli.connect import SocketOption, connect_or_start
from gpulease.cli.exit_codes import last_words, status_of_job
from gpulease.cli.follow import CANCELLED_WITHIN, SOUGHT_EVERY, current, wait_for_start
from gpulease.cli.format import clean, clock, size
from gpulease.cli.render import print_stderr, stderr_status, write_output
from gpulease.cli.request import RunOptions, build
from gpulease.cli.signals import Interrupted, Killed, Signals
from gpulease.client import Client, encode, indent
from gpulease.errors import EXIT_OWN_FAILURE, AlreadyLeased, GpuleaseError, NoDaemon, WrongState
from gpulease.wire.frames import FrameKind
from gpulease.wire.requests import HoldRequest, NestedRequest, from_wire, to_wire
from gpulease.wire.views import EnvironmentView, JobView

_INIT = 1


def reader_of_output() -> int:
    """Return the process that called us, or the one that waits for our output.

    In `eval "$(gpulease hold)"` our parent may be a copy of the shell that ends with us. All that
    runs inside the brackets writes to the pipe that we write to; the shell outside does not.
    """
    here = _pipe_of("self")
    pid = os.getppid()
    while pid > _INIT and here is not None and _pipe_of(pid) == here:
        pid = _parent_of(pid)
    return pid if pid > _INIT else os.getppid()


def name_of(pid: int) -> str | None:
    """Return the name of a process's program, such as bash; None where it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _pipe_of(pid: int | str) -> tuple[int, int] | None:
    """Return which pipe the standard output of a process is; None for anything else."""
    with suppress(OSError):
        found = Path(f"/proc/{pid}/fd/1").stat()
        if stat.S_ISFIFO(found.st_mode):
            return found.st_dev, found.st_ino
    return None


def _parent_of(pid: int) -> int:
    # The name of the program, in brackets, may hold anything.
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return _INIT


Dialect = Literal["sh", "fish", "csh"]

_DIALECTS: Mapping[str, Dialect] = {"fish": "fish", "csh": "csh", "tcsh": "csh"}
_LIKE_SH = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "busybox", "yash"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def dialect_of(program: str | None, login_shell: str | None) -> Dialect:
    """Return what a shell understands: by its name, or else by what $SHELL says."""
    for path in (program, login_shell):
        # A login shell calls itself -bash.
        name = (path or "").rpartition("/")[2].removeprefix("-")
        if name in _DIALECTS:
            return _DIALECTS[name]
        if name in _LIKE_SH:
            return "sh"
    return "sh"


def statements(new: Mapping[str, str], unset: Iterable[str], dialect: Dialect) -> str:
    """Return the lines that set and unset variables; each ends in a semicolon.

    A name that no shell accepts is left out: it came with the environment and stays in it.
    """
    gone = [_UNSET[dialect].format(name) for name in unset if _NAME.fullmatch(name)]
    given = [
        _SET[dialect].format(name, _quoted(value, dialect))
        for name, value in new.items()
        if _NAME.fullmatch(name)
    ]
    return "\n".join([*gone, *given])


_SET: Mapping[Dialect, str] = {
    "sh": "export {}={};",
    "fish": "set -gx {} {};",
    "csh": "setenv {} {};",
}
_UNSET: Mapping[Dialect, str] = {"sh": "unset {};", "fish": "set -e {};", "csh": "unsetenv {};"}


def _quoted(value: str, dialect: Dialect) -> str:
    match dialect:
        case "fish":
            inside = value.replace("\\", "\\\\").replace("'", "\\'")
        case "csh":
            # History is looked for inside quotes too, and a line ends there.
            inside = value.replace("'", "'\\''").replace("!", "\\!").replace("\n", "\\\n")
        case "sh":
            inside = value.replace("'", "'\\''")
    return f"'{inside}'"


_option = partial(typer.Option, show_default=False)


def hold(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    mem: Annotated[
        str | None, _option("--mem", metavar="SIZE", help="Memory on each GPU: 4G, 4096M, 40%.")
    ] = None,
    gpus: Annotated[int, _option("--gpus", metavar="N", help="How many GPUs; 1 if left out.")] = 1,
    exclusive: Annotated[bool, _option("--exclusive", help="Share the GPUs with nobody.")] = False,
    lasts: Annotated[
        str | None,
        _option("--for", metavar="SPAN", help="Hold it for 90s, 30m, 4h, whatever ends meanwhile."),
    ] = None,
    pid: Annotated[
        int | None, _option("--pid", metavar="PID", help="Hold it until this process ends.")
    ] = None,
    name: Annotated[
        str | None, _option("--name", metavar="TEXT", help="What listings call the lease.")
    ] = None,
    no_wait: Annotated[
        bool, _option("--no-wait", help="Give up (exit 75) if it would have to wait.")
    ] = False,
    wait: Annotated[
        str | None, _option("--wait", metavar="SPAN", help="Give up (exit 75) after so long.")
    ] = None,
    visible: Annotated[
        Literal["uuid", "index"],
        _option("--visible", help="How CUDA_VISIBLE_DEVICES names the GPUs; uuid if left out."),
    ] = "uuid",
    shell: Annotated[
        Literal["sh", "fish", "csh"] | None,
        _option("--shell", help="For which shell to write; yours if left out."),
    ] = None,
    as_json: Annotated[bool, _option("--json", help="Print the lease as JSON.")] = False,
    socket: SocketOption = None,
) -> int:
    """Hold GPU memory for this shell, and print what puts the lease into force in it.

    It waits in the queue as run does, and lasts until the shell ends, or the
    process that --pid names, or the time that --for gives.

    \b
    Examples:
      eval "$(gpulease hold --mem 4G)"
      eval "$(gpulease hold --mem 8G --gpus 2 --for 2h)"
      gpulease hold --mem 4G | source               (fish)
      gpulease cancel $GPULEASE_JOB                 (gives it back)

    \b
    Exit code: 0, or
       75  --no-wait or --wait gave up    125  gpulease itself failed
      130  you pressed Ctrl-C
    """
    options = RunOptions(
        mem=mem,
        gpus=gpus,
        exclusive=exclusive,
        time=lasts,
        name=name,
        wait=wait,
        no_wait=no_wait,
        visible=visible,
        pty=False,
    )
    reader = reader_of_output()
    request = _request(options, reader, pid)
    client, started = connect_or_start(ctx, socket)
    if started:
        print_stderr(f"gpulease: no daemon was running; started one for you (socket {client.path})")
    _refuse_inside_another(client)
    written_for = shell or dialect_of(name_of(reader), environment().get("SHELL"))
    return _hold(client, request, partial(_written, as_json=as_json, shell=written_for))


def _request(options: RunOptions, reader: int, pid: int | None) -> HoldRequest:
    made = build(options, [], this_process())
    for_nobody = options.time is not None and pid is None
    return HoldRequest(
        environment=made.environment,
        pid=None if for_nobody else pid or reader,
        claim=made.claim,
        options=made.options,
        name=made.name,
        wait=made.wait,
    )


def _refuse_inside_another(client: Client) -> None:
    """Refuse where this process runs under the lease that its environment names.

    The environment alone does not decide: it outlives the job in whatever inherits it.
    """
    known = environment().get("GPULEASE_JOB", "")
    around = client.nested(NestedRequest({"GPULEASE_JOB": to_wire(known)})) if known else None
    if around is not None and around.job is not None and str(around.job.id) == known:
        hint = f"give that one back first: gpulease cancel {known}"
        if around.job.kind == "run":
            hint = "gpulease run and gpulease.lease use its lease; for another: run --new-lease"
        raise AlreadyLeased(f"cannot hold a lease here: job {known} is in force already", hint)


def _hold(
    client: Client, request: HoldRequest, written: Callable[[JobView, EnvironmentView], bytes]
) -> int:
    stderr = stderr_status()
    with Signals() as signals:
        job = client.hold(request)
        try:
            job = wait_for_start(client, job, signals, stderr)
            if job.state != "active":
                return _not_granted(job)
            view = _environment(client, job, signals)
            # Byte for byte: a variable need not be text.
            write_output(FrameKind.STDOUT, written(current(client, job), view))
        except Interrupted as interrupted:
            stderr.line.clear()
            _give_back(client, job)
            raise Killed(interrupted.signum) from None
        except BaseException:
            # Nobody was told of it, so nobody would give it back.
            _give_back(client, job)
            raise
    print_stderr(_held(job, stderr.now()))
    if sys.stdout.isatty():
        print_stderr(_not_in_force(job))
    return 0


def _environment(client: Client, job: JobView, signals: Signals) -> EnvironmentView:
    """Return what the lease sets, through any absence of the daemon."""
    while True:
        with suppress(NoDaemon):
            return client.environment(job.id)
        signals.interruptible(partial(time.sleep, SOUGHT_EVERY))


def _give_back(client: Client, job: JobView) -> None:
    try:
        with suppress(WrongState):  # it has ended by itself
            client.within(CANCELLED_WITHIN).cancel(job.id)
            print_stderr(f"gpulease: job {job.id} was cancelled")
    except GpuleaseError as error:
        print_stderr(f"gpulease: job {job.id} may still be held: {clean(error.message)}")


def _not_granted(job: JobView) -> int:
    print_stderr(last_words(job) or f"gpulease: job {job.id} was over before it was held")
    return status_of_job(job) or EXIT_OWN_FAILURE


def _written(job: JobView, view: EnvironmentView, *, as_json: bool, shell: Dialect) -> bytes:
    new = {from_wire(name): from_wire(value) for name, value in view.set.items()}
    unset = [from_wire(name) for name in view.unset]
    if not as_json:
        return os.fsencode(statements(new, unset, shell) + "\n")
    readable = {_as_text(name): _as_text(value) for name, value in new.items()}
    told = {"job": job, "set": readable, "unset": [_as_text(name) for name in unset]}
    return indent(encode(told)).encode() + b"\n"


def _as_text(value: str) -> str:
    """Return what JSON can hold of a variable."""
    return os.fsencode(value).decode(errors="replace")


def _held(job: JobView, now: datetime) -> str:
    memory = size(min((lease.memory for lease in job.leases), default=None))
    count = len(job.leases)
    where = "1 GPU" if count == 1 else f"each of {count} GPUs"
    ends = [f"until process {job.pid}{_called(job.pid)} ends"] if job.pid else []
    if job.expires_at is not None:
        ends.append(f"{'at the latest ' if ends else ''}until {clock(job.expires_at, now)}")
    return f"gpulease: job {job.id} holds {memory} on {where} {', '.join(ends)}"


def _called(pid: int) -> str:
    name = name_of(pid)
    return f" ({clean(name)})" if name else ""


def _not_in_force(job: JobView) -> str:
    return (
        "gpulease: it is not in force in this shell, for nothing read the lines above\n\n"
        f'hint: gpulease cancel {job.id}, and then eval "$(gpulease hold ...)"'
    )
