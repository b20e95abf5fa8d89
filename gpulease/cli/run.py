"""`gpulease run`: lease, wait, run as if there were no lease, and exit as the command exits.

`gpulease run` inside a job: the command in place of this process, under the job's lease.

A second job would wait for the first one to end, which waits for this command.
"""

import os
import signal
from collections.abc import Sequence
from errno import ENOEXEC
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gpulease.cli import options as given
from gpulease.cli.attach import detach_sequence
from gpulease.cli.caller import environment, this_process
from gpulease.cli.connect import SocketOption, connect_or_start
from gpulease.cli.follow import FollowOptions, follow
from gpulease.cli.format import asks, clean, size
from gpulease.cli.program import find, resolve, shell_of
from gpulease.cli.render import say, show, talk
from gpulease.cli.request import RunOptions, build
from gpulease.cli.signals import Signals
from gpulease.client import Client
from gpulease.errors import AlreadyLeased, BadValue, CommandNotExecutable
from gpulease.wire.requests import NestedRequest, SubmitRequest, from_wire, to_wire
from gpulease.wire.views import JobView, NestedView

_SECOND = "for a second lease beside it: gpulease run --new-lease"
_SHELL = "/bin/sh"
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores, and that a command would inherit as ignored."""


def lease_around(client: Client, request: SubmitRequest, options: RunOptions) -> NestedView | None:
    """Return the lease under which this process runs already, with the part that is asked for.

    Raises:
        AlreadyLeased: it runs under one that cannot give what is asked for.
    """
    asked = NestedRequest(request.environment, request.claim, request.options)
    try:
        around = client.nested(asked)
    except AlreadyLeased as error:
        raise AlreadyLeased(error.message, f"{error.hint}; {_SECOND}") from None
    if around is not None and around.job is not None:
        _refuse_what_takes_a_job(around.job.id, options)
    return around


def become(around: NestedView, argv: Sequence[str], options: RunOptions) -> NoReturn:
    """Replace this process by a command under the lease around it.

    Its terminal, its streams, its process group and its exit code are then this process's own.

    Raises:
        CommandNotExecutable: the kernel refuses it.
    """
    assert around.job is not None and around.environment is not None
    count = len(around.gpus)
    where = "1 GPU" if count == 1 else f"each of {count} GPUs"
    say(
        f"gpulease: runs within the lease of job {around.job.id}: {size(around.memory)} on {where}"
        + _without_effect(options)
    )
    variables = dict(environment())
    for name in around.environment.unset:
        variables.pop(from_wire(name), None)
    new = around.environment.set.items()
    variables |= {from_wire(name): from_wire(value) for name, value in new}
    for signum in _SET_BY_PYTHON:
        signal.signal(signum, signal.SIG_DFL)
    _execute(argv, variables)


def _execute(argv: Sequence[str], variables: dict[str, str]) -> NoReturn:
    try:
        try:
            os.execvpe(argv[0], list(argv), variables)  # noqa: S606  becoming the command
        except OSError as error:
            if error.errno != ENOEXEC:
                raise
        # A file of no known format is a shell's, see execvp(3).
        script = argv[0] if "/" in argv[0] else str(find(argv[0], Path.cwd(), variables))
        os.execve(_SHELL, [_SHELL, script, *argv[1:]], variables)  # noqa: S606
    except OSError as error:
        raise CommandNotExecutable(f"cannot run {argv[0]}: {error.strerror}") from error


def _refuse_what_takes_a_job(job: int, options: RunOptions) -> None:
    """Check that no option needs a job of its own.

    Raises:
        AlreadyLeased: one does.
    """
    in_background = "in the background of this shell: gpulease run COMMAND &"
    refused = (
        (options.detach, "-d", f"{in_background}; {_SECOND} -d"),
        (options.retry_oom is not None, "--retry-oom", f"give it to job {job} itself; {_SECOND}"),
    )
    for is_given, option, hint in refused:
        if is_given:
            raise AlreadyLeased(
                f"cannot use {option} within the lease of job {job}: it takes a job of its own",
                hint,
            )


def _without_effect(options: RunOptions) -> str:
    given = {
        "--name": options.name is not None,
        "--grace": options.grace is not None,
        "--pty": options.pty is True,
        "--no-pty": options.pty is False,
    }
    names = ", ".join(option for option, is_given in given.items() if is_given)
    return f" ({names} {'have' if ',' in names else 'has'} no effect there)" if names else ""


def run(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="What to run; a .py runs under your python, unless it names its own.",
            show_default=False,
        ),
    ] = None,
    mem: given.MemOption = None,
    gpus: given.GpusOption = 1,
    exclusive: given.ExclusiveOption = False,
    time: given.TimeOption = None,
    early_signal: given.SignalOption = None,
    grace: given.GraceOption = None,
    name: given.NameOption = None,
    detach: given.DetachOption = False,
    retry_oom: given.RetryOomOption = None,
    shell: given.ShellOption = False,
    pty: given.PtyOption = None,
    detach_keys: given.DetachKeysOption = None,
    no_wait: given.NoWaitOption = False,
    wait: given.WaitOption = None,
    visible: given.VisibleOption = "uuid",
    growth: given.GrowthOption = False,
    split: given.SplitOption = 1,
    inter_op_threads: given.InterOpThreadsOption = None,
    intra_op_threads: given.IntraOpThreadsOption = None,
    soft_placement: given.SoftPlacementOption = False,
    log_placement: given.LogPlacementOption = False,
    strict: given.StrictOption = False,
    new_lease: given.NewLeaseOption = False,
    socket: SocketOption = None,
) -> int:
    """Run COMMAND on a GPU where SIZE of memory is its own, waiting for it if need be.

    The job is you: your python, your directory, your environment, your terminal.
    Options of gpulease go before COMMAND; what follows it belongs to it.
    Ctrl-\\ and then d leave it running; gpulease attach finds it again.
    Without --mem it gets what the script used before, or the daemon's default.
    Inside a job, or a shell that holds a lease, COMMAND runs within that lease.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease run --mem 40% --gpus 2 --time 4h -- torchrun train.py
      gpulease run --mem 8G -d --name sweep-7 bash sweep.sh
      gpulease run --mem 4G --time 4h --signal USR1@120 train.py
      gpulease run --mem 4G --shell

    \b
    Exit code: COMMAND's own, or
      128+N  signal N ended it         124  time, memory or idleness did
       75    --no-wait or --wait gave up    125  gpulease itself failed
      126    COMMAND cannot be executed     127  COMMAND was not found
    """
    if not command and not shell:
        ctx.fail("Missing argument 'COMMAND...'")
    options = RunOptions(
        mem=mem,
        gpus=gpus,
        exclusive=exclusive,
        time=time,
        early_signal=early_signal,
        grace=grace,
        name=name,
        wait=wait,
        no_wait=no_wait,
        detach=detach,
        retry_oom=retry_oom,
        shell=shell,
        pty=pty,
        visible=visible,
        growth=growth,
        split=split,
        inter_op_threads=inter_op_threads,
        intra_op_threads=intra_op_threads,
        soft_placement=soft_placement,
        log_placement=log_placement,
        strict=strict,
    )
    keys = detach_sequence(detach_keys)
    request = _request(options, command or [])
    client, started = connect_or_start(ctx, socket)
    if started:
        say(f"gpulease: no daemon was running; started one for you (socket {client.path})")
    if not new_lease and (around := lease_around(client, request, options)) is not None:
        become(around, [from_wire(word) for word in request.argv], options)
    return _submit(client, request, options, keys)


def _request(options: RunOptions, command: list[str]) -> SubmitRequest:
    caller = this_process()
    if options.shell:
        if command:
            raise BadValue(
                f"cannot run both a shell and {command[0]}: --shell takes no command",
                "leave out --shell to run the command, or type it into the shell",
            )
        command = [shell_of(caller.environment)]
    request = build(options, command, caller)
    if request.terminal is None and not options.detach and caller.streams.stdout:
        # The job writes to a pipe and not to this terminal, and Python would hold its output back.
        request.environment = {"PYTHONUNBUFFERED": "1", **request.environment}
    found = resolve(command, Path(caller.cwd), caller.environment)
    request.argv = [to_wire(word) for word in found]
    return request


def _submit(client: Client, request: SubmitRequest, options: RunOptions, keys: bytes) -> int:
    if options.detach:
        job = client.submit(request)
        _tell_the_default(job, options)
        show(str(job.id))
        return 0
    with Signals() as signals:
        job = client.submit(request)
        _tell_the_default(job, options)
        errand = FollowOptions(
            keys=keys, is_shell=options.shell, follows_retries=options.retry_oom is not None
        )
        return follow(client, job, signals, talk(), errand)


def _tell_the_default(job: JobView, options: RunOptions) -> None:
    if options.mem is None and job.sized:
        say(f"gpulease: {clean(job.sized)}; --mem asks for another size")
    elif options.mem is None:
        say(f"gpulease: job {job.id} leases the default of {asks(job)}; --mem says otherwise")
