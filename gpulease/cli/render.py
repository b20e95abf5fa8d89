"""Print: data to standard output, messages and the status of a job to standard error."""

from __future__ import annotations

import io
import os
import sys
from datetime import UTC, datetime

from gpulease.locations import environment
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from gpulease.cli.tables import Page
    from gpulease.errors import GpuleaseError
    from gpulease.wire.frames import FrameKind

_FORCE_COLOUR = ("FORCE_COLOR", "CLICOLOR_FORCE")
_NARROWEST = 20
"""Columns of a terminal; a narrower one wraps the lines itself."""
_WIDEST_CHARACTER = 2
_USUAL = 80
"""Columns of a terminal that does not say how many it has."""


@record(frozen=True)
class Screen:
    """Where a page is printed; `width` is None for a pipe or a file."""

    width: int | None
    colour: bool
    height: int | None = None
    """The lines of a terminal."""
    ascii: bool = False
    """It shows ASCII only."""


def screen_of(stream: TextIO | None, environment: Mapping[str, str]) -> Screen:
    """Return the width and the colour for `stream`; None is a closed stream.

    A pipe is as wide as COLUMNS says, which watch(1) sets, and without it as wide as the text.
    NO_COLOR (https://no-color.org) has precedence over FORCE_COLOR and CLICOLOR_FORCE.
    """
    is_terminal = stream is not None and stream.isatty()
    width = _columns(environment) or (_terminal_columns() if is_terminal else 0)
    colour = is_terminal and environment.get("TERM", "dumb") != "dumb"
    forced = any(environment.get(name, "0") not in ("", "0") for name in _FORCE_COLOUR)
    colour = (colour or forced) and not environment.get("NO_COLOR")
    return Screen(
        width=max(_NARROWEST, width) if width else None,
        colour=colour,
        height=_terminal_lines() if is_terminal else None,
        ascii=not _shows_blocks(stream, environment),
    )


def stdout_screen() -> Screen:
    """Return the width and the colour for standard output."""
    return screen_of(sys.stdout, environment())


def _shows_blocks(stream: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Return whether a stream has the characters of bars; without a locale, terminals do."""
    named = (environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    locale = next(filter(None, named), "utf8").lower().replace("-", "")
    encoding = (getattr(stream, "encoding", None) or "utf8").lower().replace("-", "")
    # The font of the console of Linux lacks some of them.
    return "utf8" in locale and encoding == "utf8" and environment.get("TERM") != "linux"


def terminal_width(handle: int = 1) -> int:
    """Return the columns of the terminal, or what COLUMNS says."""
    return max(_NARROWEST, _columns(environment()) or _terminal_columns(handle))


def _columns(environment: Mapping[str, str]) -> int:
    columns = environment.get("COLUMNS", "")
    return int(columns) if columns.isascii() and columns.isdecimal() else 0


def _terminal_columns(handle: int = 1) -> int:
    try:
        return os.get_terminal_size(handle).columns or _USUAL
    except OSError:
        return _USUAL


def _terminal_lines() -> int | None:
    try:
        return os.get_terminal_size(1).lines or None
    except OSError:
        return None


def local_time() -> datetime:
    """Return the time, in the zone of this process."""
    return datetime.now(UTC).astimezone()


def own_name() -> str:
    """Return the caller's user name as the daemon writes it."""
    from gpulease.peer_credentials import user_name

    # As the daemon names the owner of a job; the environment (USER) may say something else.
    return user_name(os.geteuid())


def replace_unencodable() -> None:
    """Print characters that the locale cannot write as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class OutputClosed(Exception):
    """Standard output is a pipe that its reader has closed."""


def print_stdout(text: str) -> None:
    """Print a result.

    Raises:
        OutputClosed: as every function here that writes to standard output.
    """
    write_stdout(text + "\n")


def write_stdout(text: str) -> None:
    # Typer handles BrokenPipeError in its own way.
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise OutputClosed from None


def print_stderr(text: str) -> None:
    """Print a message; a terminal gets it in lines that break between words."""
    write_stderr("\n".join(message_lines(text)) + "\n")


def message_lines(text: str) -> list[str]:
    """Return the lines of a message, which on a terminal are no wider than it is."""
    lines = text.split("\n")
    if sys.stderr is None or not sys.stderr.isatty():
        return lines
    width = max(_NARROWEST, _columns(environment()) or _terminal_columns(sys.stderr.fileno()))
    if max(map(len, lines)) * _WIDEST_CHARACTER <= width:
        return lines
    from gpulease.cli.tables import draw, line

    # An empty line is drawn as one.
    return draw([line(each) for each in lines], width).splitlines()


def write_stderr(text: str) -> None:
    """Write a message that ends its own lines; a closed standard error is no failure."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        pass


def print_error(error: GpuleaseError) -> None:
    """Print what failed, and the hint."""
    from gpulease.drawing.words import clean

    message = "\n".join(map(clean, error.message.splitlines()))
    print_stderr(message if error.hint is None else f"{message}\n\nhint: {clean(error.hint)}")


def write_output(kind: FrameKind, piece: bytes) -> None:
    """Write a piece of a job's output to the same stream of this process."""
    from gpulease.wire.frames import FrameKind

    handle = 2 if kind == FrameKind.STDERR else 1
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except BrokenPipeError:
        raise OutputClosed from None


IN_ASCII = str.maketrans("█▒▚░▓╱·…─▁▂▃▄▅▆▇", "#=!.x/-~-_.:-=+*")
"""What stands for characters that a terminal lacks."""


def drawn(page: Page, screen: Screen) -> str:
    """Return a page as text for a screen."""
    from gpulease.cli.tables import draw

    return shown(draw(page, screen.width, colour=screen.colour), screen)


def shown(text: str, screen: Screen) -> str:
    """Return text with the characters that a screen has."""
    return text.translate(IN_ASCII) if screen.ascii else text


def show_page(page: Page, screen: Screen | None = None) -> None:
    """Print a page of lines and tables, if no screen is given for standard output as it is."""
    write_stdout(drawn(page, screen or stdout_screen()))


_LESS = ["less", "-FRX"]
"""It ends at the end of a short text, shows colours, and leaves the text on the screen."""


def print_paged(text: str) -> None:
    """Print a result, in a pager if it has more lines than the terminal.

    Nothing is started for a pipe, a file, TERM=dumb or an empty PAGER.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    rows, argv = _terminal_lines() if is_terminal else None, pager(environment())
    if not (rows and argv and text.count("\n") >= rows and _print_to(argv, text)):
        write_stdout(text)


def pager(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the pager: `less -FRX`, or what PAGER names; empty for none."""
    if environment.get("TERM", "dumb") == "dumb":
        return []
    return environment["PAGER"].split() if "PAGER" in environment else _LESS


def _print_to(argv: list[str], text: str) -> bool:
    """Print to a pager and wait for its end; return False if it cannot be started."""
    import signal
    import subprocess

    before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the pager
    try:
        shown = text.encode(sys.stdout.encoding, "replace")
        subprocess.run(argv, input=shown, env={"LESS": "FRX", **environment()}, check=False)
    except OSError:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True
