"""`gpulease run`: lease GPU memory, wait for it, run a command, and exit as the command does.

Inside a job the command replaces this process, under the lease of the job: a second job would wait
for the first to end, which waits for this command.
"""

import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from errno import ENOEXEC
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gpulease.cli import options as given
from gpulease.cli.attach import detach_sequence
from gpulease.cli.caller import environment, this_process
from gpulease.cli.connect import SocketOption, connect_or_start, started_message
from gpulease.cli.dry_run import dry_run
from gpulease.cli.follow import FollowOptions, follow
from gpulease.cli.format import clean, id_of, requested, size
from gpulease.cli.messages import preset_devices
from gpulease.cli.program import find, resolve, shell_of
from gpulease.cli.queue_options import begin_instant, dependencies
from gpulease.cli.render import print_stderr, print_stdout, stderr_status
from gpulease.cli.request import RunOptions, build
from gpulease.cli.run_defaults import CommandWithUsersDefaults as Command
from gpulease.cli.signals import Signals
from gpulease.cli.snapshot import take_snapshot
from gpulease.client import Client
from gpulease.errors import AlreadyLeased, BadUsage, BadValue, CommandNotExecutable
from gpulease.wire.jobs import JobView, NestedView
from gpulease.wire.requests import NestedRequest, SubmitRequest, from_wire, to_wire

__all__ = ["Command", "run"]

_NEW_LEASE = "for a second lease: gpulease run --new-lease"
_SHELL = "/bin/sh"
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores, and that a command would inherit as ignored."""


def run(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="The command and its arguments; a .py script or .ipynb notebook uses your python.",
            show_default=False,
        ),
    ] = None,
    mem: given.MemOption = None,
    gpus: given.GpusOption = None,
    gpu: given.GpuOption = None,
    gpu_model: given.GpuModelOption = None,
    min_vram: given.MinVramOption = None,
    same_model: given.SameModelOption = False,
    exclusive: given.ExclusiveOption = False,
    time: given.TimeOption = None,
    early_signal: given.SignalOption = None,
    grace: given.GraceOption = None,
    new_lease: given.NewLeaseOption = False,
    detach: given.DetachOption = False,
    no_wait: given.NoWaitOption = False,
    wait: given.WaitOption = None,
    retry_oom: given.RetryOomOption = None,
    array: given.ArrayOption = None,
    after: given.AfterOption = None,
    begin: given.BeginOption = None,
    held: given.HeldOption = False,
    requeue: given.RequeueOption = False,
    preemptible: given.PreemptibleOption = False,
    priority: given.PriorityOption = "normal",
    nice: given.NiceOption = 0,
    snapshot: given.SnapshotOption = False,
    dry: given.DryRunOption = False,
    json: given.RunJsonOption = False,
    name: given.NameOption = None,
    end_with_command: given.EndWithCommandOption = False,
    verbose: given.VerboseOption = False,
    summary: given.SummaryOption = False,
    shell: given.ShellOption = False,
    pty: given.PtyOption = None,
    detach_keys: given.DetachKeysOption = None,
    visible: given.VisibleOption = "uuid",
    growth: given.GrowthOption = False,
    split: given.SplitOption = None,
    processes: given.ProcessesOption = None,
    deterministic: given.DeterministicOption = False,
    omp_threads: given.OmpThreadsOption = None,
    inter_op_threads: given.InterOpThreadsOption = None,
    intra_op_threads: given.IntraOpThreadsOption = None,
    soft_placement: given.SoftPlacementOption = False,
    log_placement: given.LogPlacementOption = False,
    strict: given.StrictOption = False,
    no_defaults: given.NoDefaultsOption = False,
    socket: SocketOption = None,
) -> int:
    """Lease GPU memory, wait until it is free, and run COMMAND as you.

    COMMAND gets your python, directory, environment and terminal. Options of gpulease
    come before COMMAND; everything after it belongs to COMMAND.

    Without --mem, a script gets what it used before, or else the daemon's default.
    Inside a job, or in a shell that holds a lease, COMMAND runs within that lease.
    Ctrl-\\ and then d detach: the job continues, gpulease attach connects again.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease run --mem 40% --gpus 2 --time 4h -- torchrun train.py
      gpulease run --mem 8G --processes 2 serve.py
      gpulease run --mem 8G -d --name sweep-7 bash sweep.sh
      gpulease run --mem 4G train.ipynb --output results.ipynb
      gpulease run --mem 4G -- docker run --rm IMAGE python train.py
      gpulease run --mem 4G --time 4h --signal USR1@2m train.py
      gpulease run --mem 4G --array 0-99%8 train.py
      gpulease run --mem 4G --after 17 evaluate.py
      gpulease run --mem 4G --shell
      gpulease run --mem 4G --dry-run train.py

    \b
    Exit code: that of COMMAND, or
        2  an option is wrong
       75  gave up waiting (--no-wait, --wait), or would wait (--dry-run)
       97  with --strict: a framework cannot be limited to the lease, or a
           process sets CUDA_VISIBLE_DEVICES to a GPU outside it
      124  a limit ended the job: its time, its lease, or idleness
      125  gpulease failed, or the daemon refused the request
      126  COMMAND cannot be executed
      127  COMMAND was not found
      128+N  signal N ended COMMAND
    """
    if not command and not shell:
        raise BadUsage(
            "cannot run: no COMMAND is given", "gpulease run --mem 4G train.py, or --shell"
        )
    options = RunOptions(
        mem=mem,
        gpus=gpus,
        gpu=tuple(gpu or ()),
        gpu_model=gpu_model,
        min_vram=min_vram,
        same_model=same_model,
        exclusive=exclusive,
        time=time,
        early_signal=early_signal,
        grace=grace,
        name=name,
        wait=wait,
        no_wait=no_wait,
        # Nobody can attach to many jobs.
        detach=detach or array is not None,
        retry_oom=retry_oom,
        array=array,
        after=tuple(after or ()),
        begin=begin,
        held=held,
        requeue=requeue,
        preemptible=preemptible,
        priority=priority,
        nice=nice,
        snapshot=snapshot,
        end_with_command=end_with_command,
        verbose=verbose,
        summary=summary,
        shell=shell,
        pty=pty,
        visible=visible,
        growth=growth,
        split=split,
        processes=processes,
        deterministic=deterministic,
        omp_threads=omp_threads,
        inter_op_threads=inter_op_threads,
        intra_op_threads=intra_op_threads,
        soft_placement=soft_placement,
        log_placement=log_placement,
        strict=strict,
    )
    _refuse_with_array(options)
    _refuse_to_end_with_nobody(options)
    if json and not dry:
        raise BadValue(
            "cannot use --json without --dry-run: the output is that of the command",
            "gpulease show --json JOB prints a job as JSON",
        )
    keys = detach_sequence(detach_keys)
    request = _request(options, command or [])
    client, started = connect_or_start(ctx, socket)
    if started:
        print_stderr(started_message(client))
    outer = None if new_lease else _outer_lease(client, request, options)
    if outer is None:
        _complete(client, request, options)
    if dry:
        return dry_run(client, request, outer, json=json)
    if outer is not None:
        _become(outer, [from_wire(word) for word in outer.argv or request.argv], options)
    if snapshot:
        _run_a_copy(request, must=Command.was_typed(ctx, "snapshot"))
    return _submit(client, request, options, keys)


def _request(options: RunOptions, command: list[str]) -> SubmitRequest:
    caller = this_process()
    if options.shell:
        if command:
            raise BadValue(
                f"cannot run both a shell and {command[0]}: --shell takes no command",
                "leave out --shell to run the command, or type the command into the shell",
            )
        command = [shell_of(caller.environment)]
    request = build(options, command, caller)
    if request.terminal is None and not options.detach and caller.streams.stdout:
        # Python would buffer output to the pipe of the job, though it is shown on a terminal here.
        request.environment = {"PYTHONUNBUFFERED": "1", **request.environment}
    if options.begin is not None:
        request.queue.begin_at = begin_instant(options.begin, datetime.now(UTC).astimezone())
    found = resolve(command, Path(caller.cwd), caller.environment)
    request.argv = [to_wire(word) for word in found]
    return request


def _complete(client: Client, request: SubmitRequest, options: RunOptions) -> None:
    """Add what concerns a job of its own only, and not a command within a lease."""
    request.queue.after = dependencies(client, options.after)
    if not options.gpu and (text := preset_devices(environment())) is not None:
        print_stderr(text)


def _refuse_with_array(options: RunOptions) -> None:
    if options.array is None:
        return
    for option, is_given in (("--shell", options.shell), ("--no-wait", options.no_wait)):
        if is_given:
            raise BadValue(
                f"cannot use --array and {option} together",
                "the elements of an array run in the background, each when there is room",
            )


def _refuse_to_end_with_nobody(options: RunOptions) -> None:
    if options.end_with_command and options.detach:
        raise BadValue(
            "cannot use --end-with-command in the background: this command ends at once",
            "leave out -d, or leave out --end-with-command",
        )


def _run_a_copy(request: SubmitRequest, *, must: bool) -> None:
    variables = {from_wire(key): from_wire(value) for key, value in request.environment.items()}
    argv = [from_wire(word) for word in request.argv]
    argv, variables = take_snapshot(argv, Path(from_wire(request.cwd)), variables, must=must)
    request.argv = [to_wire(word) for word in argv]
    request.environment = {to_wire(key): to_wire(value) for key, value in variables.items()}


def _submit(client: Client, request: SubmitRequest, options: RunOptions, keys: bytes) -> int:
    if options.detach:
        job = client.submit(request)
        _say_default(job, options, request.argv)
        print_stdout(str(job.id))
        if options.summary:
            print_stderr(f"gpulease: no --summary in the background; see gpulease show {job.id}")
        if options.array is not None:
            print_stderr(
                f"gpulease: array {job.id} is queued, from {id_of(job)} on; "
                f"gpulease show {job.id} sums it up, gpulease logs {id_of(job)} shows output"
            )
        return 0
    with Signals() as signals:
        job = client.submit(request)
        _say_default(job, options, request.argv)
        follow_options = FollowOptions(
            keys=keys,
            is_shell=options.shell,
            follows_retries=options.retry_oom is not None,
            requeue=options.requeue,
            verbose=options.verbose,
            summary=options.summary,
        )
        return follow(client, job, signals, stderr_status(), follow_options)


def _say_default(job: JobView, options: RunOptions, command: Sequence[str]) -> None:
    if options.mem is None and job.sized:
        print_stderr(f"gpulease: {clean(job.sized)}; to ask for another size, use --mem")
    elif options.mem is None:
        print_stderr(f"gpulease: job {id_of(job)} leases the default, {requested(job)}; see --mem")
    if options.mem is None and "--mem" in command:
        print_stderr("gpulease: --mem after the command was passed to the command")


# Within the lease of a job.


def _outer_lease(client: Client, request: SubmitRequest, options: RunOptions) -> NestedView | None:
    """Return the lease under which this process already runs, with the part that is asked for.

    Raises:
        AlreadyLeased: that lease cannot give what is asked for.
    """
    asked = NestedRequest(request.environment, request.claim, request.options, request.argv)
    try:
        outer = client.nested(asked)
    except AlreadyLeased as error:
        raise AlreadyLeased(error.message, f"{error.hint}; {_NEW_LEASE}") from None
    if outer is not None and outer.job is not None:
        _refuse_options_of_a_job(outer.job.id, options)
    return outer


def _refuse_options_of_a_job(job: int, options: RunOptions) -> None:
    refused = (
        (
            options.detach,
            "-d" if options.array is None else "--array",
            f"in the background of this shell: gpulease run COMMAND &; {_NEW_LEASE} -d",
        ),
        *(
            (is_given, option, f"{_NEW_LEASE} {option} ...")
            for option, is_given in (
                ("--after", bool(options.after)),
                ("--begin", options.begin is not None),
                ("--held", options.held),
            )
        ),
        (
            options.retry_oom is not None,
            "--retry-oom",
            f"use it where job {job} is started; {_NEW_LEASE}",
        ),
    )
    for is_given, option, hint in refused:
        if is_given:
            raise AlreadyLeased(
                f"cannot use {option} within the lease of job {job}: no new job is queued", hint
            )


def _become(outer: NestedView, argv: Sequence[str], options: RunOptions) -> NoReturn:
    """Replace this process by a command under the lease around it.

    The command takes over its terminal, streams, process group and exit code.

    Raises:
        CommandNotExecutable: the kernel refuses it.
    """
    assert outer.job is not None and outer.environment is not None
    count = len(outer.gpus)
    where = "1 GPU" if count == 1 else f"each of {count} GPUs"
    print_stderr(
        f"gpulease: runs within the lease of job {id_of(outer.job)}: "
        f"{size(outer.memory)} on {where}" + _without_effect(options)
    )
    if outer.notice:
        print_stderr(f"gpulease: {clean(outer.notice)}")
    variables = dict(environment())
    for name in outer.environment.unset:
        variables.pop(from_wire(name), None)
    changes = outer.environment.set.items()
    variables |= {from_wire(name): from_wire(value) for name, value in changes}
    for signum in _IGNORED_BY_PYTHON:
        signal.signal(signum, signal.SIG_DFL)
    _execute(argv, variables)


def _without_effect(options: RunOptions) -> str:
    unused = {
        "--name": options.name is not None,
        "--grace": options.grace is not None,
        "--snapshot": options.snapshot,
        "--verbose": options.verbose,
        "--summary": options.summary,
        "--requeue": options.requeue,
        "--preemptible": options.preemptible,
        "--priority": options.priority != "normal",
        "--nice": options.nice != 0,
        "--pty": options.pty is True,
        "--no-pty": options.pty is False,
    }
    names = ", ".join(option for option, is_given in unused.items() if is_given)
    return f" ({names} {'have' if ',' in names else 'has'} no effect there)" if names else ""


def _execute(argv: Sequence[str], variables: dict[str, str]) -> NoReturn:
    try:
        try:
            os.execvpe(argv[0], list(argv), variables)  # noqa: S606  becoming the command
        except OSError as error:
            if error.errno != ENOEXEC:
                raise
        # A file of no known format is a shell script, see execvp(3).
        script = argv[0] if "/" in argv[0] else str(find(argv[0], Path.cwd(), variables))
        os.execve(_SHELL, [_SHELL, script, *argv[1:]], variables)  # noqa: S606
    except OSError as error:
        raise CommandNotExecutable(f"cannot run {argv[0]}: {error.strerror}") from error
