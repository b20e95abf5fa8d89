"""JSON by the C functions of the standard library, without the modules `json` and `re`.

Objects are read as namespaces: `view.leases[0].memory`. What they contain is not checked; the
typed client checks it with msgspec, which takes longer to import than the interpreter to start.
"""

from __future__ import annotations

import _json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SPACE = " \t\n\r"
_INDENT = 2
_LARGE = 100_000
"""Bytes from which a document is left as it came: a program reads it, and indents it if needed."""


class Namespace:
    """An object of JSON; its fields are attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Namespace({vars(self)!r})"


class _Raw(str):
    """A number, exactly as the document has it."""

    __slots__ = ()


class _Context:
    """What the scanner asks for."""

    strict = True
    object_pairs_hook = None
    parse_constant = float

    def __init__(
        self,
        object_hook: Callable[[dict[str, Any]], object] | None = None,
        *,
        raw_numbers: bool = False,
    ) -> None:
        self.object_hook = object_hook
        self.parse_float: type = _Raw if raw_numbers else float
        self.parse_int: type = _Raw if raw_numbers else int


def decode(text: bytes | str, kind: type[Namespace] = Namespace) -> Any:
    """Return a JSON document with its objects as namespaces of a kind.

    Raises:
        ValueError: it is not JSON.
    """
    return _scan(text, _Context(kind))


def decode_plain(text: bytes | str) -> Any:
    """Return a JSON document with its objects as dictionaries.

    Raises:
        ValueError: it is not JSON.
    """
    return _scan(text, _Context())


def _scan(text: bytes | str, context: _Context) -> Any:
    text = (text if isinstance(text, str) else text.decode()).strip(_SPACE)
    try:
        value, end = _json.make_scanner(context)(text, 0)  # type: ignore[arg-type]
    except StopIteration as error:
        raise ValueError(f"no JSON at character {error.value}") from None
    except RecursionError:
        raise ValueError("this JSON is nested too deeply") from None
    if end != len(text):
        raise ValueError(f"more than one JSON document, at character {end}")
    return value


def encode(value: object) -> bytes:
    """Return a value as JSON in ASCII, without spaces; records and namespaces are objects."""
    write = _json.make_encoder(
        None, vars, _json.encode_basestring_ascii, None, ":", ",", False, False, True
    )
    return "".join(write(value, 0)).encode()


def indent(body: bytes) -> str:
    """Return JSON indented for people, or as it is if it is too long for them.

    Characters that a terminal would interpret are escaped: the text may come from another user.
    """
    if len(body) > _LARGE:
        text = body.decode()
    else:
        text = _indented(_scan(body, _Context(raw_numbers=True)), "\n")
    if text.isascii() and "\x7f" not in text:
        return text  # JSON itself holds no other control characters
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def _indented(value: Any, newline: str) -> str:
    inner = newline + " " * _INDENT
    if isinstance(value, dict) and value:
        items = (f"{_json.encode_basestring(key)}: {_indented(value[key], inner)}" for key in value)
        return f"{{{inner}{f',{inner}'.join(items)}{newline}}}"
    if isinstance(value, list) and value:
        return f"[{inner}{f',{inner}'.join(_indented(each, inner) for each in value)}{newline}]"
    if isinstance(value, str):
        return str(value) if isinstance(value, _Raw) else _json.encode_basestring(value)
    return encode(value).decode()


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
