"""Print: data to standard output, messages and the status of a job to standard error."""

import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from gpulease.cli.caller import environment
from gpulease.cli.format import clean
from gpulease.cli.messages import WaitingLine
from gpulease.cli.tables import Page
from gpulease.cli.tables import draw as drawn
from gpulease.errors import GpuleaseError
from gpulease.wire.frames import FrameKind

_FORCE_COLOUR = ("FORCE_COLOR", "CLICOLOR_FORCE")
_NARROWEST = 20
"""Columns of a terminal; a narrower one wraps the lines itself."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a page is printed; `width` is None for a pipe or a file."""

    width: int | None
    colour: bool


def screen_of(stream: TextIO | None, environment: Mapping[str, str]) -> Screen:
    """Return the width and the colour for `stream`; None is a closed stream.

    A pipe is as wide as COLUMNS says, which watch(1) sets, and without it as wide as the text.
    NO_COLOR (https://no-color.org) has precedence over FORCE_COLOR and CLICOLOR_FORCE.
    """
    is_terminal = stream is not None and stream.isatty()
    columns = environment.get("COLUMNS", "")
    width = int(columns) if columns.isascii() and columns.isdecimal() else 0
    if not width and is_terminal:
        width = shutil.get_terminal_size().columns
    colour = is_terminal and environment.get("TERM", "dumb") != "dumb"
    forced = any(environment.get(name, "0") not in ("", "0") for name in _FORCE_COLOUR)
    colour = (colour or forced) and not environment.get("NO_COLOR")
    return Screen(max(_NARROWEST, width) if width else None, colour)


def terminal_width() -> int:
    """Return the columns of the terminal, or what COLUMNS says."""
    return max(_NARROWEST, shutil.get_terminal_size().columns)


def forgive_encodings() -> None:
    """Print what the locale cannot write as question marks, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class NobodyReads(Exception):
    """Our standard output is a pipe, and its reader has left."""


def show(text: str) -> None:
    """Print data.

    Raises:
        NobodyReads: as every function here that writes to stdout.
    """
    _print(text + "\n")


def _print(text: str) -> None:
    # As an error of its own, since typer has a meaning for the system's.
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise NobodyReads from None


def say(text: str) -> None:
    """Print talk."""
    draw(text + "\n")


def draw(text: str) -> None:
    """Write talk that manages its own lines; nobody has to listen."""
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def complain(error: GpuleaseError) -> None:
    """Print what went wrong and what to do about it."""
    message = "\n".join(map(clean, error.message.splitlines()))
    say(message if error.hint is None else f"{message}\n\nhint: {clean(error.hint)}")


def pass_on(kind: FrameKind, piece: bytes) -> None:
    """Write a piece of a job's output to the stream that it is of, byte for byte."""
    handle = 2 if kind == FrameKind.STDERR else 1
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except BrokenPipeError:
        raise NobodyReads from None


def show_page(page: Page, screen: Screen) -> None:
    """Print a page of lines and tables."""
    _print(drawn(page, screen.width, colour=screen.colour))


@dataclass(frozen=True, slots=True)
class Talk:
    """The command's own voice."""

    say: Callable[[str], None]
    line: WaitingLine
    now: Callable[[], datetime]


def talk() -> Talk:
    """Return the voice of this process: on stderr, in local time."""
    screen = screen_of(sys.stderr, environment())
    rewrites = screen.width is not None and environment().get("TERM", "dumb") != "dumb"
    return Talk(
        say=say,
        line=WaitingLine(draw, terminal_width if rewrites else None),
        now=lambda: datetime.now(UTC).astimezone(),
    )
