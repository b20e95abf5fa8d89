"""What waits to be written comes out as it went in, and takes little more room than its bytes."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from gpulease.write_buffer import Backlog, Piece

PIECES = st.lists(st.one_of(st.binary(max_size=9), st.binary(min_size=4096, max_size=5000)))


@given(PIECES, st.lists(st.integers(0, 6000), min_size=1).filter(any))
def test_bytes_come_out_as_they_went_in(pieces: list[bytes], takes: list[int]) -> None:
    backlog, written, turn = Backlog(), bytearray(), 0
    changing = bytearray(5000)

    def take(some: list[Piece]) -> int:
        taken = b"".join(some)[: takes[turn % len(takes)]]
        written.extend(taken)
        return len(taken)

    for piece in pieces:
        changing[: len(piece)] = piece
        backlog.add(memoryview(changing)[: len(piece)])
        if backlog.size:
            backlog.write(take)
            turn += 1
    while backlog.size:
        backlog.write(take)
        turn += 1

    assert bytes(written) == b"".join(pieces)


def test_single_bytes_take_little_more_room_than_one_piece() -> None:
    tracemalloc.start()
    try:
        backlog = Backlog()
        for _ in range(200_000):
            backlog.add(b"x")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert backlog.size == 200_000
    assert held < 3 * backlog.size


def test_what_is_cleared_is_gone() -> None:
    backlog = Backlog()
    backlog.add(b"x")
    backlog.clear()
    backlog.add(b"y")
    written: list[Piece] = []
    backlog.write(lambda some: written.extend(some) or 1)

    assert b"".join(written) == b"y"
