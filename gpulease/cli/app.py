"""The entry point of the `gpulease` command: errors become a message and an exit code here."""

from __future__ import annotations

import errno
import gc
import os
import sys

from gpulease.build import described

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    import typer

    from gpulease.cli.signals import Killed

_BROKEN_PIPE = 141
_USAGE = 2
_CANNOT_WRITE = frozenset({errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""EBADF: standard output is closed."""


def main() -> None:
    """Run the command line of this process, and exit with its exit code."""
    _open_closed_streams()
    match sys.argv[1:]:
        case ["--version"]:
            _leave(_print_version())
        case ["__complete", *words]:
            # A shell runs this at every Tab and waits for it.
            from gpulease.cli.completion import answer

            answer(words)
            _leave(0)
        case line:
            _leave(call(line))


def _leave(exit_code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which takes as long as a request."""
    try:
        sys.stdout.flush()
    except OSError as error:
        exit_code = exit_code or _output_lost(error)
    os._exit(exit_code)


def _print_version() -> int:
    # Scripts call this often, and it needs no import of the verbs.
    try:
        sys.stdout.write(f"gpulease {described()}\n")
    except OSError as error:
        return _output_lost(error)
    return 0


def call(arguments: Sequence[str]) -> int:
    """Run one command line, print what goes wrong, and return the exit code."""
    from gpulease.cli.render import OutputClosed, print_error, replace_unencodable
    from gpulease.errors import GpuleaseError

    replace_unencodable()
    try:
        return _invoke(arguments)
    except GpuleaseError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        from gpulease.cli.signals import EndedByInterrupt

        return _end_by(EndedByInterrupt(ctrl_c_typed=False))
    except OutputClosed:
        # The interpreter would print_error once more as it flushes on its way out.
        _discard_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        return _output_lost(error)
    except Exception as error:
        from gpulease.cli.signals import Killed

        if isinstance(error, Killed):
            return _end_by(error)
        raise


def _end_by(killed: Killed) -> int:
    """End this process by the signal; return an exit code only if that signal is ignored.

    A shell ends its loop only if a signal ended the command, not if the command exited with 130.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    killed.take_effect()
    return 128 + killed.signum


def _output_lost(error: OSError) -> int:
    from gpulease.cli.render import print_stderr

    _discard_stdout()
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE
    print_stderr(f"cannot write the output: {error.strerror}")
    return 1


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _invoke(arguments: Sequence[str]) -> int:
    if (status := _run_everyday(arguments)) is not None:
        return status
    import typer

    from gpulease.cli import commands

    try:
        return commands.invoke(arguments)
    except typer.TyperException as error:
        return _misused(error, arguments)


def _misused(error: typer.TyperException, arguments: Sequence[str]) -> int:
    from gpulease.cli.render import print_stderr
    from gpulease.cli.verbs import VERBS

    # An option without its value is an error of the parser, which knows no verb.
    verb = next((word for word in arguments if word in VERBS), "")
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else f"gpulease {verb}".rstrip()
    message = error.format_message().rstrip(".")
    sentence = message[:1].lower() + message[1:]
    print_stderr(f"cannot understand the command: {sentence}\n\nhint: {path} --help")
    return error.exit_code


def _open_closed_streams() -> None:
    # With `>&-` the next file or socket that is opened would become stdout. /dev/null takes the
    # place, in the first two opened for the wrong direction: it fails as a closed stream does.
    for handle, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, mode)
    # Python has none for a closed stream.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


# The verbs of every day, without typer.

_SWITCH = "GPULEASE_QUICK_PARSER"
"""Set to "off", all lines are read by typer: for tests of both ways."""


def _run_everyday(line: Sequence[str]) -> int | None:
    """Run a command line, and return its exit code; None if typer has to read the line."""
    from gpulease.cli.quick_parser import parse, with_defaults
    from gpulease.cli.verbs import VERBS
    from gpulease.locations import environment

    if environment().get(_SWITCH) == "off":
        return None
    if (parsed := parse(line)) is None:
        return _print_help(line)
    verb, typed = parsed
    if verb == "run":
        return _run_quickly(typed)
    gc.disable()  # otherwise it scans a long list many times while the list is read
    module, _, function = VERBS[verb].quick.partition(".")
    perform = getattr(__import__(f"gpulease.cli.{module}", fromlist=[function]), function)
    return perform(**with_defaults(verb, typed)) or 0


def _print_help(line: Sequence[str]) -> int | None:
    """Print the help of all verbs, or the short one of one; None if typer has it."""
    match line:
        case [] | ["help" | "--help" | "-h"] | [_, "--help" | "-h"] | ["help", _]:
            pass
        case _:
            return None
    from gpulease.cli.help_page import SHORT, help_of_all, short_help
    from gpulease.cli.render import print_stderr, print_stdout

    if not line:
        print_stderr(help_of_all(sys.stderr))
        return _USAGE
    if len(line) == 1:
        print_stdout(help_of_all(sys.stdout))
        return 0
    verb = line[1] if line[0] == "help" else line[0]
    if verb not in SHORT:
        return None
    print_stdout(short_help(verb, sys.stdout))
    return 0


def _run_quickly(typed: dict[str, Any]) -> int:
    from gpulease.cli.quick_parser import with_defaults
    from gpulease.cli.run_defaults import name_sources, users_defaults
    from gpulease.cli.run_job import run_job
    from gpulease.errors import GpuleaseError
    from gpulease.locations import environment
    from gpulease.options import run_options

    defaults = users_defaults(typed, environment())
    values = with_defaults("run", {name: each.value for name, each in defaults.items()} | typed)
    command, socket = values.pop("command") or [], values.pop("socket")
    try:
        return run_job(run_options(values), command, socket, must_copy="snapshot" in typed)
    except GpuleaseError as error:
        name_sources(error, [each for name, each in defaults.items() if name not in typed])
        raise
