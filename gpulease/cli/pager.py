"""Show long results in a pager: `less -FRX`, or the program that PAGER names."""

from __future__ import annotations

import os
import sys
from itertools import chain
from signal import SIGPIPE

from gpulease.cli.render import write_stdout
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LESS = ["less", "-FRX"]
"""It ends at the end of a short text, shows colours, and leaves the text on the screen."""


def print_paged(pieces: Iterable[str]) -> None:
    """Print a result as its pieces come, in a pager if it has more lines than the terminal.

    Nothing is started for a pipe, a file, TERM=dumb or an empty PAGER.

    Raises:
        OutputClosed: the reader of a pipe has closed it.
    """
    rows, argv, pieces = _rows(), pager(environment()), iter(pieces)
    first: list[str] = []
    lines = 0
    while rows and argv and lines < rows:
        piece = next(pieces, None)
        if piece is None:
            break
        first.append(piece)
        lines += piece.count("\n")
    else:
        if rows and argv and _print_to(argv, chain(first, pieces)):
            return
    for piece in chain(first, pieces):
        write_stdout(piece)


def pager(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the pager; empty for none."""
    if environment.get("TERM", "dumb") == "dumb":
        return []
    return environment["PAGER"].split() if "PAGER" in environment else _LESS


def _rows() -> int:
    """Return the lines of the terminal; 0 if there is none, or its size is unknown."""
    try:
        return os.get_terminal_size(1).lines if sys.stdout.isatty() else 0
    except (AttributeError, OSError):  # a closed stream is None
        return 0


def _print_to(argv: list[str], pieces: Iterable[str]) -> bool:
    """Print to a pager and wait for its end; return False if it cannot be started."""
    reader, writer = os.pipe()
    try:
        pid = os.posix_spawnp(
            argv[0],
            argv,
            {"LESS": "FRX", **environment()},
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)],
            # Python ignores it.
            setsigdef=[SIGPIPE],
        )
    except OSError:
        os.close(writer)
        return False
    finally:
        os.close(reader)
    try:
        with os.fdopen(writer, "w", encoding=sys.stdout.encoding, errors="replace") as pipe:
            pipe.writelines(pieces)
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # its user has seen enough
    finally:
        _wait(pid)
    return True


def _wait(pid: int) -> None:
    while True:
        try:
            os.waitpid(pid, 0)
        except KeyboardInterrupt:  # Ctrl-C is for the pager
            continue
        return
