"""The way in and out of the `gpulease` command.

Errors become a message and an exit code here and nowhere else.
"""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gpulease.build import described

if TYPE_CHECKING:
    import typer

    from gpulease.cli.signals import Killed

_BROKEN_PIPE = 141
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main() -> None:
    """Run the command of this process, and leave with its exit code."""
    _open_closed_streams()
    match sys.argv[1:]:
        case ["--version"]:
            sys.exit(_tell_version())
        case ["__complete", *words]:
            sys.exit(_complete(words))
        case line:
            sys.exit(call(line))


def _complete(words: Sequence[str]) -> int:
    # A shell asks this at every Tab, and waits for it.
    from gpulease.cli.completion import answer

    answer(words)
    return 0


def _tell_version() -> int:
    # Scripts ask this often, and it needs nothing of what the verbs import.
    if sys.stdout is not None:
        sys.stdout.write(f"gpulease {described()}\n")
    return 0


def call(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; what goes wrong has been said by then."""
    from gpulease.cli.render import OutputClosed, print_error, replace_unencodable
    from gpulease.cli.signals import EndedByInterrupt, Killed
    from gpulease.errors import GpuleaseError

    replace_unencodable()
    try:
        return _invoke(arguments)
    except GpuleaseError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _end_by(EndedByInterrupt(ctrl_c_typed=False))
    except Killed as killed:
        return _end_by(killed)
    except OutputClosed:
        # The interpreter would print_error once more as it flushes on its way out.
        _write_no_more()
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _write_no_more()
        print_error(GpuleaseError(f"cannot write the output: {error.strerror}"))
        return 1


def _end_by(killed: "Killed") -> int:
    """End this process by the signal; return an exit code only if that signal is ignored.

    A shell ends its loop only after a command that a signal has ended, and not after one that
    exits with 130.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    killed.take_effect()
    return 128 + killed.signum


def _write_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _invoke(arguments: Sequence[str]) -> int:
    import typer

    from gpulease.cli import commands

    try:
        return commands.invoke(arguments)
    except typer.TyperException as error:
        return _misused(error)


def _misused(error: "typer.TyperException") -> int:
    from gpulease.cli.render import print_stderr

    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "gpulease"
    message = error.format_message().rstrip(".")
    sentence = message[:1].lower() + message[1:]
    print_stderr(f"cannot understand the command: {sentence}\n\nhint: {path} --help")
    return error.exit_code


def _open_closed_streams() -> None:
    # With `>&-` the next file that is opened would become stdout, and a socket be written to as
    # such. /dev/null the wrong way round keeps the place and refuses as a closed stream would.
    for handle, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, mode)
