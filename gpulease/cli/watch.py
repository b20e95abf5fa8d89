"""Refresh a page in place, as `gpulease status --watch` does, until Ctrl-C or q."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time

from gpulease.cli.caller import is_ours
from gpulease.cli.render import (
    drawn,
    local_time,
    print_stderr,
    show_page,
    stdout_screen,
    write_stdout,
)
from gpulease.cli.signals import ENDING, Killed, Signals
from gpulease.cli.tables import line
from gpulease.drawing.words import clean, shorten
from gpulease.errors import BadUsage, GpuleaseError
from gpulease.locations import environment
from gpulease.units import parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    from gpulease.cli.render import Screen
    from gpulease.cli.tables import Page

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Another screen, without a cursor, on which long lines do not wrap."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ATOMIC = "\x1b[?2026h{}\x1b[?2026l"
"""Terminals that support synchronized output show the text between these at once."""
_QUITS = frozenset(b"qQ\x03\x04")


def watch_page(
    ask: Callable[[], Any], lay_out: Callable[[Any, Screen], Page], every: str, *, json: bool
) -> int:
    """Show what `ask` returns, again after each span `every`; return the exit code.

    While there is no answer, the last page stays, with a note. In a pipe, pages follow each other.

    Raises:
        BadUsage: with JSON.
        GpuleaseError: there is no first answer.
        Killed: a signal other than SIGINT.
    """
    seconds = parse_span(every).total_seconds()
    if json:
        raise BadUsage("cannot watch as JSON", "gpulease status --json prints it once")
    pages = _Pages(ask, lay_out)
    pages.refresh()
    if not sys.stdout.isatty() or environment().get("TERM", "dumb") == "dumb":
        return _one_after_another(pages, seconds)
    with Signals() as signals, signals.also(signal.SIGWINCH, signal.SIGTSTP), _Terminal() as shown:
        _in_place(pages, seconds, signals, shown)
    return 0


class _Pages:
    """The latest answer, laid out for a screen, with a note if it is old."""

    def __init__(self, ask: Callable[[], Any], lay_out: Callable[[Any, Screen], Page]) -> None:
        self._ask, self._lay_out = ask, lay_out
        self._view: Any = None
        self.note: str | None = None

    def refresh(self) -> None:
        """Ask again.

        Raises:
            GpuleaseError: there is no answer, and has never been one.
        """
        try:
            self._view = self._ask()
            self.note = None
        except GpuleaseError as error:
            if self._view is None:
                raise
            since = f"{local_time():%H:%M:%S}"
            self.note = self.note or f"since {since}: {clean(error.message)}"

    def on(self, screen: Screen) -> Page:
        """Lay out the latest answer."""
        return self._lay_out(self._view, screen)


def _one_after_another(pages: _Pages, seconds: float) -> int:
    while True:
        screen = stdout_screen()
        if pages.note is None:
            show_page([*pages.on(screen), line("")], screen)
        else:
            print_stderr(f"gpulease: {pages.note}")
        time.sleep(seconds)
        pages.refresh()


def _in_place(pages: _Pages, seconds: float, signals: Signals, shown: _Terminal) -> None:
    due = time.monotonic() + seconds
    shown.show(pages)
    while True:
        sources = [signals.fileno(), *shown.keyboard]
        ready = select.select(sources, [], [], max(0, due - time.monotonic()))[0]
        caught = signals.take()
        for signum in caught:
            if signum in ENDING and signum != signal.SIGINT:
                raise Killed(signum)
        if signal.SIGINT in caught or (0 in ready and shown.is_quit_typed()):
            return
        if signal.SIGTSTP in caught:
            shown.leave()
            signals.stop(group=False)
            shown.enter()
        if time.monotonic() >= due:
            pages.refresh()
            due = time.monotonic() + seconds
        shown.show(pages)


class _Terminal:
    """A terminal in which only lines that have changed are written again."""

    def __init__(self) -> None:
        self.keyboard = [0] if is_ours(0) else []
        self._before: Any = None
        self._lines: list[str] = []
        self._screen: Screen | None = None

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_error: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Begin with an empty screen; keys are read one by one, and not shown."""
        self._lines, self._screen = [], None
        if self.keyboard:
            self._before = termios.tcgetattr(0)
            keys = termios.tcgetattr(0)
            keys[3] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(0, termios.TCSADRAIN, keys)
        write_stdout(_ENTER)

    def leave(self) -> None:
        """Show again what was there before."""
        write_stdout(_LEAVE)
        if self.keyboard:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def is_quit_typed(self) -> bool:
        """Read what was typed; return whether that is q, or the end of input."""
        typed = os.read(0, 64)
        if not typed:
            self.keyboard = []
        return bool(_QUITS & set(typed))

    def show(self, pages: _Pages) -> None:
        """Show the latest page, with its note in the last line."""
        screen = stdout_screen()
        height = screen.height or 24
        lines = drawn(pages.on(screen), screen).splitlines()[:height]
        if pages.note is not None:
            # A terminal that does not wrap writes the rest of a longer line over its last column.
            text = shorten(pages.note, screen.width or len(pages.note))
            note = drawn([line(text, "bad")], screen)
            lines = [*lines[: height - 1], note.rstrip("\n")]
        if screen != self._screen:
            self._lines, self._screen = [], screen
            changes = ["\x1b[2J"]
        else:
            changes = []
        before = self._lines
        for number in range(max(len(lines), len(before))):
            text = lines[number] if number < len(lines) else ""
            if number >= len(before) or before[number] != text:
                changes.append(f"\x1b[{number + 1}H\x1b[K{text}")
        self._lines = lines
        if changes:
            write_stdout(_ATOMIC.format("".join(changes)))
