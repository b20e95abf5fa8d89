"""What a job has switched on in the terminal, so that it can be switched off without the job.

A full-screen program that is left behind cannot clean up after itself. Pure: bytes in, bytes out.
"""

import re

_SWITCH = re.compile(rb"\x1b\[\?([0-9;]{1,32})([hl])")
_UNFINISHED = re.compile(rb"\x1b(?:\[(?:\?[0-9;]{0,32})?)?\Z")
_CURSOR = 25
"""The one that is on at first: the cursor is seen."""
_KNOWN = (1, 9, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004, _CURSOR)
"""Private modes of xterm: cursor keys, reports of mouse and focus, other screen, marked pastes."""


class Modes:
    """Follow the private modes of a terminal through what is written to it."""

    def __init__(self) -> None:
        self._changed: dict[int, None] = {}
        self._rest = b""

    def note(self, piece: bytes) -> None:
        """Read what is written."""
        text = self._rest + piece
        for found in _SWITCH.finditer(text):
            on = found[2] == b"h"
            for mode in found[1].split(b";"):
                self._switch(int(mode or b"0"), on)
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished else b""

    def undo(self) -> bytes:
        """Return what sets a terminal back to where it was at first; the last change goes first."""
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
