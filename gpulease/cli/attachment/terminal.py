"""The terminal of this command while it shows a job, and the modes that the job sets in it.

While held, the terminal interprets no keys, since the job's pseudo-terminal does. Afterwards it is
restored. When this command detaches from a full-screen program, that program cannot reset the modes
that it has set, so `Modes` follows them.
"""

from __future__ import annotations

import os
import signal
import termios

from gpulease.cli.attachment.keyboard import Controls
from gpulease.cli.caller import is_ours, size_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

IFLAG, OFLAG, CFLAG, LFLAG, CC = 0, 1, 2, 3, 6
_DISABLED = b"\0"
"""_POSIX_VDISABLE of Linux: this character means nothing special."""


_KEY_WITHIN_S = 3.0
"""Seconds for the next of several keys."""


def next_keys(handle: int, count: int) -> bytes:
    """Return up to `count` keys that are typed on a terminal now, each within some seconds."""
    from select import select

    terminal, keys = ControllingTerminal(handle, verbatim=False), b""
    terminal.hold()
    try:
        while len(keys) < count and select([handle], [], [], _KEY_WITHIN_S)[0]:
            if not (key := os.read(handle, 1)):
                break
            keys += key
    finally:
        terminal.give_back()
    return keys


class ControllingTerminal:
    """The terminal open as `handle`.

    With `verbatim`, output comes from another terminal and already has the right line ends.
    """

    def __init__(self, handle: int, *, verbatim: bool) -> None:
        self._handle = handle
        self._verbatim = verbatim
        self._found: list[Any] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the terminal is held."""
        return self._found is not None

    @property
    def controls(self) -> Controls:
        """The terminal's characters for signals."""
        try:
            characters = (self._found or termios.tcgetattr(self._handle))[CC]
        except termios.error:
            return Controls()
        chosen = (characters[at] for at in (termios.VINTR, termios.VQUIT, termios.VSUSP))
        return Controls(*(b"" if each == _DISABLED else each for each in chosen))

    @property
    def size(self) -> tuple[int, int] | None:
        """Rows and columns."""
        return size_of(self._handle)

    def hold(self) -> None:
        """Read keys one by one without echo. Call this in the foreground only."""
        try:
            if self._found is None:
                self._found = termios.tcgetattr(self._handle)
            self._set(_uninterpreted(self._found, self._verbatim))
        except termios.error:
            pass  # it has hung up

    def give_back(self) -> None:
        """Restore the terminal."""
        found, self._found = self._found, None
        if found is not None:
            try:
                self._set(found)
            except termios.error:
                pass  # it has hung up

    def hold_again(self) -> None:
        """Hold it after this command was stopped; in the background it belongs to the shell."""
        if not is_ours(self._handle):
            self._found = None
        elif self._found is not None:
            self.hold()

    def _set(self, attributes: list[Any]) -> None:
        # In the background this signal would stop us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            # TCSANOW keeps what is typed ahead.
            termios.tcsetattr(self._handle, termios.TCSANOW, attributes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _uninterpreted(found: Sequence[Any], verbatim: bool) -> list[Any]:
    """Return `found` changed as by cfmakeraw(3), with output unchanged unless `verbatim`."""
    attributes = [*found[:CC], list(found[CC])]
    attributes[IFLAG] &= ~(
        termios.IGNBRK
        | termios.BRKINT
        | termios.PARMRK
        | termios.ISTRIP
        | termios.INLCR
        | termios.IGNCR
        | termios.ICRNL
        | termios.IXON
    )
    attributes[LFLAG] &= ~(
        termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN
    )
    attributes[CFLAG] = attributes[CFLAG] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
    if verbatim:
        attributes[OFLAG] &= ~termios.OPOST
    attributes[CC][termios.VMIN], attributes[CC][termios.VTIME] = 1, 0
    return attributes


_SWITCH = rb"\x1b\[\?([0-9;]{1,32})([hl])"
_UNFINISHED = rb"\x1b(?:\[(?:\?[0-9;]{0,32})?)?\Z"
_CURSOR = 25
"""The visible cursor, the only mode that is set at the start."""
_KNOWN = (1, 9, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004, _CURSOR)
"""Private modes of xterm: cursor keys, mouse and focus reports, other screen, bracketed paste."""


class Modes:
    """Follows the private modes of a terminal in the bytes that are written to it."""

    def __init__(self) -> None:
        self._changed: dict[int, None] = {}
        self._rest = b""

    def note(self, piece: bytes) -> None:
        """Note written bytes."""
        text = self._rest + piece
        if b"\x1b" not in text:
            return
        import re  # it takes as long to import as most jobs that print no escape sequences

        for found in re.finditer(_SWITCH, text):
            on = found[2] == b"h"
            for mode in found[1].split(b";"):
                self._switch(int(mode or b"0"), on)
        unfinished = re.search(_UNFINISHED, text)
        self._rest = unfinished[0] if unfinished else b""

    def undo(self) -> bytes:
        """Return the bytes that reset all modes, the last change first."""
        undone = [_set(mode, on=mode == _CURSOR) for mode in reversed(self._changed)]
        self._changed.clear()
        return b"".join([*undone, b"\x1b[0m"]) if undone else b""

    def _switch(self, mode: int, on: bool) -> None:
        if mode not in _KNOWN:
            return
        if on == (mode == _CURSOR):
            self._changed.pop(mode, None)
        else:
            self._changed.setdefault(mode)


def _set(mode: int, *, on: bool) -> bytes:
    return b"\x1b[?%d%s" % (mode, b"h" if on else b"l")
