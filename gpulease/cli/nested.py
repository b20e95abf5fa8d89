"""`gpulease run` inside a job: the command replaces this process, under the lease of the job."""

import os
import signal
from collections.abc import Sequence
from errno import ENOEXEC
from typing import NoReturn

from gpulease.cli.caller import working_directory
from gpulease.cli.render import print_stderr
from gpulease.cli.search_path import find
from gpulease.client import Client
from gpulease.drawing.words import clean, id_of, size
from gpulease.errors import AlreadyLeased, CommandNotExecutable
from gpulease.locations import environment
from gpulease.options import RunOptions, given_flags
from gpulease.wire.jobs import NestedView
from gpulease.wire.requests import NestedRequest, SubmitRequest, from_wire
from gpulease.wire.text import on_gpus

_NEW_LEASE = "for a second lease: gpulease run --new-lease"
_SHELL = "/bin/sh"
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores, and that a command would inherit as ignored."""


def outer_lease(client: Client, request: SubmitRequest, options: RunOptions) -> NestedView | None:
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
        _refuse_options_of_a_job(id_of(outer.job), options)
    return outer


def _refuse_options_of_a_job(job: str, options: RunOptions) -> None:
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
        *(
            (is_given, option, f"use it where job {job} is started; {_NEW_LEASE}")
            for option, is_given in (
                ("--retry-oom", options.retry_oom is not None),
                ("--retries", options.retries > 0),
            )
        ),
    )
    for is_given, option, hint in refused:
        if is_given:
            raise AlreadyLeased(
                f"cannot use {option} within the lease of job {job}: no new job is queued", hint
            )


def become(outer: NestedView, argv: Sequence[str], options: RunOptions) -> NoReturn:
    """Replace this process by a command under the lease around it.

    The command takes over its terminal, streams, process group and exit code.

    Raises:
        CommandNotExecutable: the kernel refuses it.
    """
    assert outer.job is not None and outer.environment is not None
    unused = [flag for flag, each in given_flags(options).items() if each.is_of_new_jobs]
    has = "have" if len(unused) > 1 else "has"
    print_stderr(
        f"gpulease: runs within the lease of job {id_of(outer.job)}: "
        + on_gpus(size(outer.memory), len(outer.gpus))
        + (f" ({', '.join(unused)} {has} no effect there)" if unused else "")
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


def _execute(argv: Sequence[str], variables: dict[str, str]) -> NoReturn:
    try:
        try:
            os.execvpe(argv[0], list(argv), variables)  # noqa: S606  becoming the command
        except OSError as error:
            if error.errno != ENOEXEC:
                raise
        # A file of no known format is a shell script, see execvp(3).
        script = argv[0] if "/" in argv[0] else str(find(argv[0], working_directory(), variables))
        os.execve(_SHELL, [_SHELL, script, *argv[1:]], variables)  # noqa: S606
    except OSError as error:
        raise CommandNotExecutable(f"cannot run {argv[0]}: {error.strerror}") from error
