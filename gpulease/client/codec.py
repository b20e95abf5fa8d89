"""Wire objects to and from JSON."""

from typing import TypeVar

import msgspec

from gpulease.errors import GpuleaseError

View = TypeVar("View")


def decode(kind: type[View], body: bytes) -> View:
    """Return the wire object in a reply; unknown fields are ignored.

    Raises:
        GpuleaseError: the daemon and this command are of incompatible versions.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise GpuleaseError(
            f"cannot read the daemon's answer: {error}",
            "after an upgrade, restart the daemon; running jobs continue",
        ) from error


def encode(view: object) -> bytes:
    """Return a wire object as the JSON that the daemon would send."""
    # The command builds requests of namespaces: they need no import of the shapes.
    return msgspec.json.encode(view, enc_hook=vars)
