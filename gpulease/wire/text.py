"""Strings of the operating system as JSON can hold them: one character per byte."""

import os


def to_wire(text: str) -> str:
    """Return a string of the operating system as one character per byte."""
    return os.fsencode(text).decode("latin-1")


def from_wire(text: str) -> str:
    """Return the operating system's string for `text`; the inverse of `to_wire`.

    Raises:
        UnicodeEncodeError: `text` holds a character that is not a byte.
    """
    return os.fsdecode(text.encode("latin-1"))
