"""What goes out comes in as it was and in its order, whether it was copied or not."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.write_buffer import Conduit, Outgoing

PIECES = st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=50_000)), max_size=12)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@given(PIECES)
def test_pieces_arrive_in_order_however_they_travel(pieces: list[tuple[bool, bytes]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        outgoing, conduit, arrived = Outgoing(ours), Conduit(), bytearray()
        for uncopied, piece in pieces:
            if uncopied and not outgoing.pours:
                outgoing.pour(filled(conduit, piece))
            else:
                outgoing.add(piece)
            send_some(outgoing)
            arrived += received(theirs)
        while outgoing.size:
            send_some(outgoing)
            arrived += received(theirs)
        conduit.clear()

        assert bytes(arrived + received(theirs)) == b"".join(piece for _, piece in pieces)


def test_what_is_cleared_is_not_sent_with_what_comes_next(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    outgoing, conduit = Outgoing(ours), Conduit()
    outgoing.pour(filled(conduit, b"old"))
    outgoing.add(b"old as well")
    outgoing.clear()
    outgoing.pour(filled(conduit, b"new"))
    outgoing.write()
    conduit.clear()

    assert theirs.recv(100) == b"new"


def test_what_cannot_be_moved_can_be_read(tmp_path: Path) -> None:
    conduit = filled(Conduit(), b"x" * 60_000)
    end = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with pytest.raises(OSError, match="Invalid"):
            conduit.pass_on(end)
    finally:
        os.close(end)

    assert conduit.read() == b"x" * 60_000
    assert conduit.held == 0
    conduit.clear()


def filled(conduit: Conduit, piece: bytes) -> Conduit:
    reader, writer = os.pipe()
    try:
        os.write(writer, piece)
        assert conduit.fill(reader, len(piece)) == len(piece)
    finally:
        os.close(reader)
        os.close(writer)
    return conduit


def send_some(outgoing: Outgoing) -> None:
    with contextlib.suppress(BlockingIOError):
        outgoing.write()


def received(sock: socket.socket) -> bytes:
    got = bytearray()
    while True:
        try:
            got += sock.recv(100_000)
        except BlockingIOError:
            return bytes(got)
