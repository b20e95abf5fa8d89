"""Wire objects to and from JSON."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

import msgspec

from gpulease.client.errors import unreadable
from gpulease.errors import BadValue
from gpulease.wire import jobs, machine, usage

View = TypeVar("View")

_READ_AS_SENT = jobs, machine, usage
"""Where the views are that the light client reads without their shapes."""


def decode(kind: type[View], body: bytes) -> View:
    """Return the wire object in a reply; unknown fields are ignored.

    Raises:
        GpuleaseError: the daemon and this command are of incompatible versions.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise unreadable(str(error)) from error


def encode(view: object) -> bytes:
    """Return a wire object as the JSON that the daemon would send.

    Raises:
        BadValue: a text in it cannot be sent.
    """
    try:
        # The command builds requests of namespaces: they need no import of the shapes.
        return msgspec.json.encode(view, enc_hook=vars)
    except UnicodeEncodeError as error:
        raise BadValue(
            f"cannot send {error.object[:80]!a} to the daemon: it is not valid UTF-8",
            "write it in UTF-8; a job can also be named by its number, which gpulease list shows",
        ) from None


def default_of(given: Mapping[str, Any], name: str) -> Any:
    """Return the default of the field `name` of a view that was sent with the `given` fields.

    Raises:
        GpuleaseError: no view with these fields has it, or it has no default.
    """
    for kind in (each for module in _READ_AS_SENT for each in vars(module).values()):
        if is_dataclass(kind) and isinstance(kind, type):
            known = {each.name: each for each in fields(kind)}
            required = {each.name for each in known.values() if not _has_default(each)}
            if name in known.keys() - required and required <= given.keys():
                return _default(known[name])
    raise unreadable(f"an object has no {name!r}")


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
