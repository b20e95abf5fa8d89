"""JSON without the module of that name reads and writes the same."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.light_json import Namespace, decode, decode_plain, encode, indent

_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
documents = st.recursive(
    _plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)
_WITHOUT_SURROGATES = st.characters(exclude_categories=["Cs"])


@given(documents)
def test_what_is_written_is_read(document: Any) -> None:
    assert json.loads(encode(document)) == document
    assert decode_plain(encode(document)) == document


def test_objects_are_read_as_namespaces() -> None:
    view = decode(b' {"leases": [{"memory": 1}], "why": null} ')
    assert view.leases[0].memory == 1
    assert view.why is None
    assert view == Namespace({"leases": [Namespace({"memory": 1})], "why": None})
    assert encode(view) == b'{"leases":[{"memory":1}],"why":null}'
    with pytest.raises(AttributeError, match="later"):
        _ = view.later


@pytest.mark.parametrize("wrong", [b"", b"{", b"nul", b'{"a":1} 2', b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        decode(wrong)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(0, 1e15) | st.text(_WITHOUT_SURROGATES),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(_WITHOUT_SURROGATES), inner),
    max_leaves=20,
))  # fmt: skip
def test_a_document_is_indented_as_msgspec_does_it(document: Any) -> None:
    body = msgspec.json.encode(document)
    indented = indent(body)
    assert json.loads(indented) == document
    if body.isascii() and b"\x7f" not in body:
        assert indented == msgspec.json.format(body, indent=2).decode()


def test_a_long_document_is_left_as_it_came_but_for_what_a_terminal_would_interpret() -> None:
    long = msgspec.json.encode(["x" * 50, "\x9b31m"] * 2000)
    assert indent(long) == long.decode().replace("\x9b", "\\u009b")
