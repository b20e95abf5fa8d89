"""The pseudo-terminal of a worker: made, set as the caller's was, and brought under control.

Its shim leads the session, as sshd's child or a login does, and the worker is the group in the
foreground. The shim keeps the slave open too: a worker that closes its own may open /dev/tty
again, and the master never ends before the last process has.
"""

import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Sequence

from gpulease.shim.launch_request import TerminalSpec

_LARGEST_SIZE = 0xFFFF
_WINDOW = struct.Struct("HHHH")
_FLAGS = 6
"""Numbers before the control characters in what tcgetattr gives: four flags and two speeds."""
_LARGEST_FLAGS = 0xFFFF_FFFF
_LFLAG, _CONTROLS = 3, 6
_NONSENSE = (termios.error, ArithmeticError, TypeError, ValueError)


class PseudoTerminal:
    """Both ends of a pseudo-terminal, as a shim holds them."""

    def __init__(self, master: int, slave: int) -> None:
        self.master = master
        self.slave = slave

    def control(self) -> None:
        """Make it the controlling terminal of this process, which leads a session without one.

        Raises:
            OSError: the system does not allow it.
        """
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size; whoever is in the foreground hears of a new one (SIGWINCH).

        0 stands for a size that is not known, as in termios.
        """
        size = [min(max(number, 0), _LARGEST_SIZE) for number in (rows, columns)]
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, _WINDOW.pack(*size, 0, 0))

    def ask_to_redraw(self) -> None:
        """Have whoever is in the foreground look at the size again, and so draw anew."""
        with contextlib.suppress(OSError):
            os.killpg(os.tcgetpgrp(self.master), signal.SIGWINCH)

    def end_of_input(self, in_a_line: bool) -> bytes:
        """Return what has to be typed now so that a reader sees the end of its input.

        In a line that was begun the first such character ends but the line.
        """
        attributes = termios.tcgetattr(self.master)
        character = bytes(attributes[_CONTROLS][termios.VEOF])
        if character == b"\0":
            return b""  # the worker has disabled it
        by_lines = attributes[_LFLAG] & termios.ICANON
        return character * (2 if in_a_line and by_lines else 1)


def open_terminal(order: TerminalSpec) -> PseudoTerminal:
    """Make a pseudo-terminal, which belongs to whom this process runs as.

    Raises:
        OSError: there is none to be had.
    """
    terminal = PseudoTerminal(*os.openpty())
    if order.attributes is not None:
        _take_over(terminal.slave, order.attributes)
    terminal.resize(order.rows, order.columns)
    return terminal


def come_to_the_foreground(slave: int) -> None:
    """Make the group of this process the one that reads and is interrupted.

    To be called while SIGTTOU is ignored still: it stops whoever does this from the background.
    """
    os.tcsetpgrp(slave, os.getpgrp())


def _take_over(slave: int, attributes: Sequence[int]) -> None:
    """Set the attributes of the caller's terminal; what makes no sense is left as it was."""
    _, _, _, _, ispeed, ospeed, controls = termios.tcgetattr(slave)
    if len(attributes) < _FLAGS:
        return
    given = attributes[_FLAGS : _FLAGS + len(controls)]
    with contextlib.suppress(*_NONSENSE):
        controls[: len(given)] = [bytes([character]) for character in given]
        iflag, oflag, cflag, lflag = (number & _LARGEST_FLAGS for number in attributes[:4])
        flags = [iflag, oflag, cflag, lflag]
        termios.tcsetattr(slave, termios.TCSANOW, [*flags, ispeed, ospeed, controls])
        # Apart, since a speed that is none spoils the whole call.
        termios.tcsetattr(slave, termios.TCSANOW, [*flags, *attributes[4:_FLAGS], controls])
