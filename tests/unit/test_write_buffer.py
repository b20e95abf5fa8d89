"""What waits to be written comes out as it went in, and takes little more room than its bytes."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from gpulease.event_loop import Piece, WriteBuffer

PIECES = st.lists(st.one_of(st.binary(max_size=9), st.binary(min_size=4096, max_size=5000)))


@given(PIECES, st.lists(st.integers(0, 6000), min_size=1).filter(any))
def test_bytes_come_out_as_they_went_in(pieces: list[bytes], takes: list[int]) -> None:
    buffer, written, turn = WriteBuffer(), bytearray(), 0
    changing = bytearray(5000)

    def take(some: list[Piece]) -> int:
        taken = b"".join(some)[: takes[turn % len(takes)]]
        written.extend(taken)
        return len(taken)

    for piece in pieces:
        changing[: len(piece)] = piece
        buffer.add(memoryview(changing)[: len(piece)])
        if buffer.size:
            buffer.write_once(take)
            turn += 1
    while buffer.size:
        buffer.write_once(take)
        turn += 1

    assert bytes(written) == b"".join(pieces)


def test_single_bytes_take_little_more_room_than_one_piece() -> None:
    tracemalloc.start()
    try:
        buffer = WriteBuffer()
        for _ in range(200_000):
            buffer.add(b"x")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert buffer.size == 200_000
    assert held < 3 * buffer.size


def test_what_is_cleared_is_gone() -> None:
    buffer = WriteBuffer()
    buffer.add(b"x")
    buffer.clear()
    buffer.add(b"y")
    written: list[Piece] = []
    buffer.write(lambda some: written.extend(some) or 1)

    assert b"".join(written) == b"y"
