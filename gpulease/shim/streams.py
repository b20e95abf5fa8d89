"""The worker's streams: what it writes, into log and audience; what it reads, from a peer."""

import os
import select
from collections.abc import Callable
from functools import partial

from gpulease.event_loop import Loop
from gpulease.shim.clients import ShimClients
from gpulease.shim.connection import ShimClient
from gpulease.shim.linux import tee
from gpulease.shim.log_file import JobLog
from gpulease.wire.frames import FrameKind, frame
from gpulease.write_buffer import ROOM, Backlog, Conduit, widen

_PIECE = 256 << 10
_BUFFER = memoryview(bytearray(_PIECE))
"""What was read last; one for all outputs, since they take turns."""
_LARGE = 64 << 10
"""Bytes; after a piece of that size the next one is moved and not copied, if it can be."""
_REPLAY = 64 << 10
_INPUT_ROOM = 256 << 10
_READS_OF_A_TERMINAL = 16
"""Put together to a piece: a terminal gives no more than a page at a time."""
_LAST_DRAIN = 4 << 20
"""Bytes read at the very end at most: someone outside of the tree may hold the pipe and go on."""


class Output:
    """Carry one output stream of the worker to its log and its audience.

    `fd` is None for a stream that is not used: there is its log alone.
    """

    def __init__(
        self,
        loop: Loop,
        peers: ShimClients,
        kind: FrameKind,
        fd: int | None,
        log: JobLog,
        is_terminal: bool = False,
    ) -> None:
        self._kind = kind
        self._log = log
        self._loop = loop
        self._fd = fd
        self._peers = peers
        self._reads = _READS_OF_A_TERMINAL if is_terminal else 1
        self._is_terminal = is_terminal
        self._last_size = 0
        self._is_wide = is_terminal
        self._to_peer, self._to_log = Conduit(), Conduit()

    def flow(self, on: bool) -> None:
        """Read on, or leave it to the full pipe to hold the worker back."""
        if self._fd is not None:
            self._loop.on_readable(self._fd, self._read if on else None)

    def insert(self, text: str) -> None:
        """Put in a line of ours, on a line of its own as far as one can tell."""
        if self._fd is not None:
            self._take_piece()  # what was written before it comes before it
        end = "\r\n" if self._is_terminal else "\n"
        begin = end if self._log.is_mid_line else ""
        self._show(f"{begin}{text}{end}".encode(errors="replace"))

    def note(self, text: str) -> None:
        """Put a line of ours into the log alone."""
        begin = "\n" if self._log.is_mid_line else ""
        self._log.write(f"{begin}[gpulease: {text}]\n".encode(errors="replace"))

    def replay(self, peer: ShimClient) -> None:
        """Send the end of the log to a peer that came late."""
        if last := self._log.tail(_REPLAY):
            peer.send(frame(self._kind, last))

    def finish(self) -> None:
        """Take what is left in the pipe, and close it and the log."""
        left = _LAST_DRAIN
        while self._fd is not None and left > 0 and (size := self._take_piece()):
            left -= size
        self._close()
        self._log.finish()

    def sync(self) -> None:
        """Wait until the log is on disk."""
        self._log.sync()

    def _read(self) -> None:
        self._take_piece()

    def _take_piece(self) -> int:
        """Carry one piece, and return its size; 0 where there is nothing now, or no more."""
        size = self._move_piece() if self._last_size >= _LARGE else None
        if size is None:
            size = self._show(self._next_piece())
        self._last_size = size
        return size

    def _show(self, piece: bytes | memoryview) -> int:
        if piece:
            self._log.write(piece)
            self._peers.show(self._kind, piece)
        return len(piece)

    def _move_piece(self) -> int | None:
        """Carry one piece without copying it to us; None: that cannot be done now."""
        peer = self._peers.only_one
        if self._fd is None or self._is_terminal or peer is None or self._to_peer.held:
            return None
        try:
            size = self._to_peer.fill(self._fd, ROOM)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        if not size:
            self._close()
            return 0
        if not self._is_wide:
            self._is_wide = True
            widen(self._fd)
        if not self._has_twin(size):
            return self._show(self._to_peer.read())
        self._log.pour(self._to_log)
        peer.send_from(self._to_peer, self._kind)
        return size

    def _has_twin(self, size: int) -> bool:
        """Let the log's conduit hold what the peer's does, if it can hold all of it."""
        try:
            if self._to_log.fill(self._to_peer.exit, size, tee) == size:
                return True
        except OSError:
            pass  # no pipe for it: the user has as many pages in pipes as they may
        self._to_log.clear()
        return False

    def _next_piece(self) -> memoryview:
        size = 0
        try:
            for _ in range(self._reads):
                if self._fd is None or size == _PIECE:
                    break
                read = os.readv(self._fd, [_BUFFER[size:]])
                if not read:
                    self._close()
                size += read
        except BlockingIOError:
            pass
        except OSError:
            self._close()  # a terminal that was hung up
        return _BUFFER[:size]

    def _close(self) -> None:
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None


class Input:
    """Feed the worker's standard input, if it has one of ours.

    With `end_of_input` it is a terminal: that gives what to type for an end, and whether a line was
    begun is what it asks for. A terminal goes on after that; a pipe is closed.
    """

    def __init__(
        self, loop: Loop, fd: int | None, end_of_input: Callable[[bool], bytes] | None = None
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._end_of_input = end_of_input
        self._queue = Backlog()
        self._in_a_line = False
        self._ended = False
        self._is_full = False
        """The pipe takes nothing more for now."""
        self._is_wide = False

    @property
    def has_room(self) -> bool:
        """Whether more may be taken from the peer for now."""
        return self._queue.size < _INPUT_ROOM and not self._is_full

    def feed(self, piece: bytes) -> None:
        """Pass `piece` on as soon as the worker reads."""
        if self._fd is None or self._ended or not piece:
            return
        self._queue.add(piece)
        self._in_a_line = piece[-1:] not in (b"\n", b"\r")
        self._write()

    def pour(self, source: int, size: int) -> int | None:
        """Move at most `size` bytes from a socket to the worker's pipe, and return how many.

        They are not copied (splice(2)). None: it has to be read, and fed.
        """
        if self._fd is None or self._ended or self._queue.size:
            return None
        if size >= _LARGE and not self._is_wide:
            self._is_wide = True
            widen(self._fd)
        try:
            return os.splice(source, self._fd, size, flags=os.SPLICE_F_NONBLOCK) or None
        except BlockingIOError:
            self._is_full = not _can_write(self._fd)
            if self._is_full:
                self._loop.on_writable(self._fd, self._write)
            return 0
        except OSError:
            return None  # the worker has closed its end, which the next write notices as well

    def end(self) -> None:
        """Let the worker see the end of its input, after what was fed before."""
        if self._end_of_input is not None:
            self.feed(self._end_of_input(self._in_a_line))
            self._in_a_line = False
            return
        self._ended = True
        self._write()

    def close(self) -> None:
        """Close the pipe now."""
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None
        self._queue.clear()
        self._is_full = False

    def _write(self) -> None:
        self._is_full = False
        try:
            while self._queue.size and self._fd is not None:
                self._queue.write(partial(os.writev, self._fd))
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


def _can_write(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))
