"""JSON by the C functions of the standard library, without the Python that `json` has around them.

A shim uses them a few times in its life, and pays for each page of memory that it touches first.
"""

import json
from typing import Any

_write: Any
_scan: Any
_decoder: Any = json.JSONDecoder()
try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    default = json.JSONEncoder().default
    _write = make_encoder(
        None, default, encode_basestring_ascii, None, ": ", ", ", False, False, True
    )
    _scan = make_scanner(_decoder)
except ImportError:  # not CPython
    _write, _scan = json.JSONEncoder().iterencode, _decoder.raw_decode

_SPACE = b" \t\r\n"


def encode(value: object) -> bytes:
    """Return plain values as one line of ASCII, without its end."""
    return "".join(_write(value, 0)).encode()


def decode(text: bytes) -> Any:
    """Read one document in UTF-8.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    string = text.strip(_SPACE).decode()
    try:
        value, end = _scan(string, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(string):
        raise ValueError("more than one document")
    return value
