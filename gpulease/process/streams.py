"""The worker's three streams: what it writes, into log and audience; what it reads, from a peer."""

import os

from gpulease.frames import FrameKind, frame
from gpulease.process.logs import JobLog
from gpulease.process.loop import Loop
from gpulease.process.peers import Peer, Peers

PIECE = 64 << 10
_INPUT_ROOM = 256 << 10
_LAST_DRAIN = 4 << 20
"""Bytes read at the very end at most: someone outside of the tree may hold the pipe and go on."""


class Output:
    """Carry one output pipe of the worker to its log and its audience."""

    def __init__(self, loop: Loop, fd: int, kind: FrameKind, log: JobLog, peers: Peers) -> None:
        self._kind = kind
        self._log = log
        self._loop = loop
        self._fd: int | None = fd
        self._peers = peers

    def flow(self, on: bool) -> None:
        """Read on, or leave it to the full pipe to hold the worker back."""
        if self._fd is not None:
            self._loop.on_readable(self._fd, self._read if on else None)

    def replay(self, peer: Peer) -> None:
        """Send the end of the log to a peer that came late."""
        if last := self._log.tail(PIECE):
            peer.send(frame(self._kind, last))

    def finish(self) -> None:
        """Take what is left in the pipe, and close it and the log."""
        left = _LAST_DRAIN
        while self._fd is not None and left > 0 and (size := self._take_piece()):
            left -= size
        self._close()
        self._log.finish()

    def _read(self) -> None:
        self._take_piece()

    def _take_piece(self) -> int:
        """Carry one piece, and return its size; 0 where there is nothing now, or no more."""
        if self._fd is None:
            return 0
        try:
            piece = os.read(self._fd, PIECE)
        except BlockingIOError:
            return 0
        if not piece:
            self._close()
            return 0
        self._log.write(piece)
        self._peers.show(self._kind, piece)
        return len(piece)

    def _close(self) -> None:
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None


class Input:
    """Feed the worker's standard input, if it has one of ours."""

    def __init__(self, loop: Loop, fd: int | None) -> None:
        self._loop = loop
        self._fd = fd
        self._queue = bytearray()
        self._ended = False

    @property
    def has_room(self) -> bool:
        """Whether more may be taken from the peer for now."""
        return len(self._queue) < _INPUT_ROOM

    def feed(self, piece: bytes) -> None:
        """Pass `piece` on as soon as the worker reads."""
        if self._fd is None or self._ended or not piece:
            return
        self._queue += piece
        self._write()

    def end(self) -> None:
        """Let the worker see the end of its input, after what was fed before."""
        self._ended = True
        self._write()

    def close(self) -> None:
        """Close the pipe now."""
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None
        self._queue.clear()

    def _write(self) -> None:
        try:
            while self._queue and self._fd is not None:
                with memoryview(self._queue) as waiting:
                    written = os.write(self._fd, waiting[:PIECE])
                del self._queue[:written]
        except BlockingIOError:
            if self._fd is not None:
                self._loop.on_writable(self._fd, self._write)
            return
        except OSError:
            self.close()  # the worker has closed its end and wants no more
            return
        if self._fd is not None:
            self._loop.on_writable(self._fd, None)
        if self._ended:
            self.close()
