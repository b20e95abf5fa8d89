"""The JSON in a peer's frame, field by field: what is not as it should be is a `BadFrame`.

All else that goes wrong with a frame is an error of the shim's own.
"""

import json
import math
from typing import Any

from gpulease.frames import BadFrame


class Payload:
    """One JSON object."""

    def __init__(self, encoded: bytes) -> None:
        """Read `encoded`.

        Raises:
            BadFrame: it is no JSON object; so does every method, for a field that cannot be.
        """
        try:
            self._content = _object(json.loads(encoded))
        except (ValueError, RecursionError) as error:
            raise BadFrame("a payload that is no JSON") from error

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def text(self, name: str) -> str:
        """Return a field that is a string."""
        value = self._value(name)
        if not isinstance(value, str):
            raise BadFrame(f"{name} is no text")
        return value

    def number(self, name: str) -> int:
        """Return a field that is a number, without its fraction."""
        return int(self.seconds(name))

    def seconds(self, name: str) -> float:
        """Return a field that is a number."""
        value = self._value(name)
        if not isinstance(value, int | float):
            raise BadFrame(f"{name} is no number")
        try:
            return _finite(float(value))
        except OverflowError as error:
            raise BadFrame(f"{name} is too large") from error

    def is_null(self, name: str) -> bool:
        """Tell whether a field is there and null."""
        return self._value(name) is None

    def inner(self, name: str) -> "Payload":
        """Return a field that is an object."""
        inner = Payload.__new__(Payload)
        inner._content = _object(self._value(name))
        return inner

    def _value(self, name: str) -> Any:
        try:
            return self._content[name]
        except KeyError:
            raise BadFrame(f"no {name}") from None


def _object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise BadFrame("a payload that is no object")
    return content


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise BadFrame("a number that is none")
    return number
