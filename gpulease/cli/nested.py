"""`gpulease run` inside a job: the command in place of this process, under the job's lease.

A second job would wait for the first one to end, which waits for this command.
"""

import os
import signal
from collections.abc import Sequence
from errno import ENOEXEC
from pathlib import Path
from typing import NoReturn

from gpulease.cli.caller import environment
from gpulease.cli.program import find
from gpulease.cli.render import say
from gpulease.cli.request import RunOptions
from gpulease.cli.text import size
from gpulease.client import Client
from gpulease.errors import AlreadyLeased, CommandNotExecutable
from gpulease.wire import NestedRequest, NestedView, SubmitRequest, from_wire

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
    for given, option, hint in refused:
        if given:
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
