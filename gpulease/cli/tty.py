"""What a terminal is like, and whose it is just now."""

import os
import termios


def is_ours(handle: int) -> bool:
    """Return whether we may read: a terminal belongs to the job in its foreground."""
    try:
        return os.tcgetpgrp(handle) == os.getpgrp()
    except OSError:
        return False


def attributes_of(handle: int) -> tuple[int, ...]:
    """Return the attributes of a terminal as the wire has them.

    Raises:
        termios.error: it is none.
    """
    *flags, characters = termios.tcgetattr(handle)
    return (*flags, *(_number(character) for character in characters))


def _number(character: bytes | int) -> int:
    # Two of them are numbers, where the terminal does not gather lines.
    return character if isinstance(character, int) else ord(character)


def size_of(handle: int) -> tuple[int, int] | None:
    """Return rows and columns; None where it is no terminal, or does not know."""
    try:
        size = os.get_terminal_size(handle)
    except OSError:
        return None
    return (size.lines, size.columns) if size.lines > 0 and size.columns > 0 else None
