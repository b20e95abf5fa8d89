"""The detach keys: what is typed arrives byte for byte, unless it was meant to detach."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.cli.attachment.keyboard import DEFAULT, DetachKeys, name_of, parse_keys
from gpulease.errors import BadValue

USUAL = parse_keys(DEFAULT)
SOME = st.sampled_from([USUAL, parse_keys("ctrl-p,ctrl-q"), parse_keys("ctrl-a a b"), b""])


def typed(keys: bytes, pieces: list[bytes]) -> tuple[bytes, bool]:
    machine, passed = DetachKeys(keys), b""
    for piece in pieces:
        came = machine.feed(piece)
        passed += came.passed
        if came.detach:
            return passed, True
    return passed, False


def cut(text: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(text) + 1) for place in places})
    bounds = [0, *ends, len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]


LIKELY = st.lists(
    st.sampled_from([b"\x1c", b"d", b"\x10", b"\x11", b"\x01", b"a", b"b", b"x", b"\x03", b"\xc3"])
).map(b"".join)


@given(SOME, LIKELY | st.binary(), st.lists(st.integers(0, 1000)))
def test_what_holds_no_detach_keys_arrives_byte_for_byte(
    keys: bytes, text: bytes, places: list[int]
) -> None:
    if keys and (keys in text or keys[:1] * 2 in text):
        return
    passed, detached = typed(keys, [*cut(text, places), b"."])
    assert (passed, detached) == (text + b".", False)


@given(SOME.filter(bool), LIKELY, st.lists(st.integers(0, 1000)))
def test_the_keys_detach_however_they_arrive(keys: bytes, text: bytes, places: list[int]) -> None:
    if keys in text or keys[:1] * 2 in text or text.endswith(keys[:1]):
        return
    passed, detached = typed(keys, cut(text + keys + b"after", places))
    assert (passed, detached) == (text, True)


@given(LIKELY, st.lists(st.integers(0, 1000)))
def test_a_paste_arrives_whole_whatever_it_holds(text: bytes, places: list[int]) -> None:
    paste = b"\x1b[200~" + text + b"\x1b[201~"
    assert typed(USUAL, cut(paste, places)) == (paste, False)
    assert typed(USUAL, [paste, USUAL]) == (paste, True)


def test_the_first_key_twice_is_passed_on_once() -> None:
    assert typed(USUAL, [b"\x1c\x1c"]) == (b"\x1c", False)
    assert typed(USUAL, [b"\x1c", b"\x1c", b"d"]) == (b"\x1cd", False)
    assert typed(USUAL, [b"\x1c", b"\x1c", b"\x1c", b"d"]) == (b"\x1c", True)


def test_it_waits_while_the_first_key_is_all_there_is() -> None:
    machine = DetachKeys(USUAL)
    assert machine.feed(b"ab\x1c").passed == b"ab"
    assert machine.waits
    machine.feed(b"x")
    assert not machine.waits


@pytest.mark.parametrize(
    ("written", "keys", "name"),
    [
        (DEFAULT, b"\x1cd", r"Ctrl-\ d"),
        ("ctrl-p,ctrl-q", b"\x10\x11", "Ctrl-p Ctrl-q"),
        ("CTRL-A D", b"\x01D", "Ctrl-a D"),
        ("ctrl-@,^^", b"\x00\x1e", "Ctrl-@ Ctrl-^"),
        (" None ", b"", ""),
    ],
)
def test_keys_are_written_as_people_name_them(written: str, keys: bytes, name: str) -> None:
    assert parse_keys(written) == keys
    assert name_of(keys) == name


@pytest.mark.parametrize("written", ["", "d", "ctrl-xy", "ctrl-1", "ctrl-p,\x07"])
def test_what_is_no_key_is_refused_with_a_sentence(written: str) -> None:
    with pytest.raises(BadValue):
        parse_keys(written)
