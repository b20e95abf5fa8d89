"""Wire objects from JSON and back."""

from typing import TypeVar

import msgspec

from gpulease.errors import GpuleaseError

View = TypeVar("View")


def decode(kind: type[View], body: bytes) -> View:
    """Read a reply; members that this version does not know are passed over.

    Raises:
        GpuleaseError: the daemon and this command do not speak the same version.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise GpuleaseError(
            f"cannot read the daemon's answer: {error}",
            "after an upgrade, restart the daemon; running jobs go on",
        ) from error


def encode(view: object) -> bytes:
    """Write a wire object as the JSON that the daemon would send."""
    return msgspec.json.encode(view)


def indent(body: bytes) -> str:
    """Return JSON laid out for people, with every member in its place.

    What a terminal would obey is written as JSON can write any character: it may be a stranger's.
    """
    text = msgspec.json.format(body, indent=2).decode()
    if text.isascii() and "\x7f" not in text:
        return text  # JSON itself holds no other control characters
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
