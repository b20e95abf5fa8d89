"""The pseudo-terminal of a worker, which starts with the settings of the caller's terminal.

The shim leads the session, as a login shell does, and the worker is the foreground process group.
The shim keeps the slave open as well: a worker that closes its own may open /dev/tty again, and the
master does not hang up before the last process has ended.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from gpulease.shim.launch_request import TerminalSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
else:
    import _signal as signal  # plain numbers, without enumerations

_LARGEST_SIZE = 0xFFFF
_WINDOW = struct.Struct("HHHH")
_FLAGS = 6
"""Numbers before the control characters in a result of tcgetattr: four flags, two speeds."""
_LARGEST_FLAGS = 0xFFFF_FFFF
_LFLAG, _CONTROLS = 3, 6
_INVALID = (termios.error, ArithmeticError, TypeError, ValueError)


class PseudoTerminal:
    """Both ends of a pseudo-terminal in the shim."""

    def __init__(self, master: int, slave: int) -> None:
        self.master = master
        self.slave = slave

    def control(self) -> None:
        """Make it the controlling terminal of this process, a session leader without one.

        Raises:
            OSError: the system does not allow it.
        """
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size. A new size sends SIGWINCH to the foreground process group.

        0 means unknown, as in termios.
        """
        size = [min(max(number, 0), _LARGEST_SIZE) for number in (rows, columns)]
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, _WINDOW.pack(*size, 0, 0))

    def request_redraw(self) -> None:
        """Make the program in the foreground redraw its screen, with SIGWINCH."""
        try:
            os.killpg(os.tcgetpgrp(self.master), signal.SIGWINCH)
        except OSError:
            pass  # no program is in the foreground

    def interrupts(self, typed: bytes) -> bool:
        """Return whether a typed key sends SIGINT or SIGQUIT, as Ctrl-C does."""
        attributes = termios.tcgetattr(self.master)
        if not attributes[_LFLAG] & termios.ISIG:
            return False  # the program reads keys itself
        keys = (bytes(attributes[_CONTROLS][key]) for key in (termios.VINTR, termios.VQUIT))
        return any(key != b"\0" and key in typed for key in keys)

    def end_of_input(self, in_a_line: bool) -> bytes:
        """Return what to type so that a reader sees the end of its input.

        In an incomplete line the first such character only ends the line.
        """
        attributes = termios.tcgetattr(self.master)
        character = bytes(attributes[_CONTROLS][termios.VEOF])
        if character == b"\0":
            return b""  # the worker has disabled it
        by_lines = attributes[_LFLAG] & termios.ICANON
        return character * (2 if in_a_line and by_lines else 1)


def open_terminal(spec: TerminalSpec) -> PseudoTerminal:
    """Open a pseudo-terminal, which belongs to the user of this process.

    Raises:
        OSError: the system has none left.
    """
    terminal = PseudoTerminal(*os.openpty())
    if spec.attributes is not None:
        _set_attributes(terminal.slave, spec.attributes)
    terminal.resize(spec.rows, spec.columns)
    return terminal


def take_foreground(slave: int) -> None:
    """Make the group of this process the foreground group of the terminal.

    Call this while SIGTTOU is ignored: that signal stops a background process that does this.
    """
    os.tcsetpgrp(slave, os.getpgrp())


def _set_attributes(slave: int, attributes: Sequence[int]) -> None:
    """Set the attributes of the caller's terminal. Invalid ones change nothing."""
    _, _, _, _, ispeed, ospeed, controls = termios.tcgetattr(slave)
    if len(attributes) < _FLAGS:
        return
    given = attributes[_FLAGS : _FLAGS + len(controls)]
    try:
        controls[: len(given)] = [bytes([character]) for character in given]
        iflag, oflag, cflag, lflag = (number & _LARGEST_FLAGS for number in attributes[:4])
        flags = [iflag, oflag, cflag, lflag]
        termios.tcsetattr(slave, termios.TCSANOW, [*flags, ispeed, ospeed, controls])
        # Separately, because an invalid speed makes the whole call fail.
        termios.tcsetattr(slave, termios.TCSANOW, [*flags, *attributes[4:_FLAGS], controls])
    except _INVALID:
        pass
