"""Everything that the command prints: data to stdout, talk to stderr.

Plain text for pipes and files. rich is imported only where a page is drawn in colour.

How the command speaks while it stays with a job, and what it knows of the time.
"""

import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from gpulease.cli.caller import environment
from gpulease.cli.format import clean
from gpulease.cli.messages import WaitingLine
from gpulease.cli.tables import Line, Page, lay_out, plain
from gpulease.errors import GpuleaseError
from gpulease.wire.frames import FrameKind

if TYPE_CHECKING:
    from rich.text import Text


_COLOURS = {
    "": "",
    "title": "bold",
    "heading": "bold dim",
    "good": "green",
    "warn": "yellow",
    "bad": "red",
    "dim": "dim",
    "lease": "cyan",
    "promise": "blue",
    "stranger": "red",
    "room": "dim",
}
_BLOCKS = {
    "lease": str.maketrans("#", "█"),
    "promise": str.maketrans("=", "▒"),
    "stranger": str.maketrans("!", "█"),
    "room": str.maketrans(".", "░"),
}
"""Colour tells apart on a terminal what takes different letters in plain text."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What is printed to: `width` is None for a pipe or a file."""

    width: int | None
    colour: bool


def screen_of(stream: TextIO | None, environment: Mapping[str, str]) -> Screen:
    """Describe what `stream` is connected to; NO_COLOR and TERM=dumb keep it plain.

    It is None where the process was started with the stream closed.
    """
    if stream is None or not stream.isatty():
        return Screen(width=None, colour=False)
    plain_terminal = environment.get("NO_COLOR") or environment.get("TERM", "dumb") == "dumb"
    return Screen(width=terminal_width(), colour=not plain_terminal)


def terminal_width() -> int:
    """Return the columns of the terminal, or what COLUMNS says."""
    return max(20, shutil.get_terminal_size().columns)


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
    if not screen.colour:
        _print(plain(page, screen.width))
        return
    from rich.console import Console

    console = Console(width=screen.width, highlight=False)
    for drawn in lay_out(page, screen.width):
        console.print(_rich_line(drawn), no_wrap=True, overflow="ignore", crop=False)


def _rich_line(spans: Line) -> "Text":
    from rich.text import Text

    return Text.assemble(
        *(
            (span.text.translate(_BLOCKS.get(span.style, {})), _COLOURS[span.style])
            for span in spans
        )
    )


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
