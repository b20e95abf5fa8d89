"""Frames survive any way in which a stream may be cut up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.wire.frames import (
    HEADER,
    KINDS,
    LARGEST_FRAME,
    BadFrame,
    FrameKind,
    FrameReader,
    frame,
)

FRAMES = st.lists(st.tuples(st.sampled_from(KINDS), st.binary(max_size=300)), max_size=10)


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1))
def test_frames_arrive_whole_however_they_are_cut(
    frames: list[tuple[FrameKind, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(frame(kind, payload) for kind, payload in frames)
    reader, got, turn = FrameReader(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        got += reader.feed(stream[:size])
        stream, turn = stream[size:], turn + 1

    assert got == frames


def test_a_frame_that_is_too_large_is_refused_before_it_comes() -> None:
    with pytest.raises(BadFrame):
        list(FrameReader().feed(HEADER.pack(FrameKind.STDIN, LARGEST_FRAME + 1)))


@given(st.integers(0, 255).filter(lambda number: number not in KINDS))
def test_an_unknown_kind_is_refused(number: int) -> None:
    with pytest.raises(BadFrame):
        list(FrameReader().feed(HEADER.pack(number, 0)))


def test_kinds_keep_their_numbers() -> None:
    numbers = {name: kind for name, kind in vars(FrameKind).items() if kind in KINDS}

    assert numbers == {
        "STDOUT": 1,
        "STDERR": 2,
        "STARTED": 3,
        "STOPPING": 4,
        "EXITED": 5,
        "REFUSED": 6,
        "MAIN_EXITED": 7,
        "SKIPPED": 8,
        "SUSPENDED": 9,
        "WATCHING": 10,
        "POSITION": 11,
        "HELLO": 16,
        "STDIN": 17,
        "STDIN_END": 18,
        "SIGNAL": 19,
        "STOP": 20,
        "TIME_LIMIT": 21,
        "WINDOW": 22,
        "NOTICE": 23,
    }
