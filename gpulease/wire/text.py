"""How text travels, and what people read in place of a name of the wire."""

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


def spoken(name: str) -> str:
    """Return a name of the wire, such as time_limit, as people see and type it: time-limit."""
    return name.replace("_", "-")
