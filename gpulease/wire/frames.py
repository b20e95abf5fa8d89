"""The protocol on the socket of a job, between its shim and the clients that attach.

A frame is one byte of kind, four bytes of length (unsigned, network order), and the payload.
Standard library only: the shim imports this.
"""

import struct
from collections.abc import Collection, Iterator
from enum import IntEnum

HEADER = struct.Struct("!BI")
LARGEST_FRAME = 1 << 20
"""Bytes of payload; a peer that announces more is disconnected."""


class FrameKind(IntEnum):
    """What a payload is; JSON is in UTF-8."""

    # From the shim.
    STDOUT = 1
    STDERR = 2
    STARTED = 3
    """JSON: {"pid": int, "started_at": str}."""
    STOPPING = 4
    """JSON: {"reason": "cancelled" | "time_limit" | "over_lease" | "idle"}: SIGTERM was sent."""
    EXITED = 5
    """JSON: the exit record. It is the last frame."""
    REFUSED = 6
    """JSON: {"message": str}: this client may not do that; the connection closes."""
    MAIN_EXITED = 7
    """JSON: {"exit_code": int} or {"signal": int}, and "at"; other processes of the job run on."""
    SKIPPED = 8
    """JSON: {"bytes": int}: output that is left out, since the client read too slowly."""
    SUSPENDED = 9
    """JSON: {"signal": int}: the main process is stopped, as by Ctrl-Z, until SIGCONT."""
    WATCHING = 10
    """JSON: {}: this client may only watch from now on, since another one writes."""
    # From clients.
    HELLO = 16
    """JSON: {"role": "attach" | "watch" | "control"}. It is the first frame.

    May have "window": {"rows": int, "columns": int}, the size of the client's terminal.
    """
    STDIN = 17
    STDIN_END = 18
    SIGNAL = 19
    """JSON: {"signal": int}: for the worker, or its group where a terminal would signal that."""
    STOP = 20
    """JSON: {"reason": str, "grace_s": float}: send SIGTERM, then SIGKILL to the whole tree."""
    TIME_LIMIT = 21
    """JSON: {"time_limit_s": float | null}: the new time limit, counted from the start."""
    WINDOW = 22
    """JSON: {"rows": int, "columns": int}: the new size of the client's terminal."""
    NOTICE = 23
    """JSON: {"text": str}: a line that the daemon adds to the output of the job.

    An older shim, which does not know this kind, closes the connection and does nothing else.
    """


class BadFrame(Exception):
    """The peer does not follow the protocol."""


def frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Return one encoded frame."""
    return HEADER.pack(kind, len(payload)) + payload


class FrameReader:
    """Cut a stream of bytes into frames, however the pieces arrive."""

    def __init__(self, in_parts: Collection[FrameKind] = ()) -> None:
        """Frames of the kinds `in_parts` are not put together, but passed on as they come."""
        self._in_parts = frozenset(in_parts)
        self._begun = bytearray()
        """What has come of a frame that is not complete yet."""
        self.passing = FrameKind.STDOUT
        """Of what kind `rest` is."""
        self.rest = 0
        """Bytes that are still to come of a frame that is passed on in parts."""

    def feed(self, piece: bytes | memoryview) -> Iterator[tuple[FrameKind, bytes]]:
        """Take in `piece` and yield each frame that is now complete; to be iterated to its end.

        Raises:
            BadFrame: the kind is unknown or the length is over `LARGEST_FRAME`.
        """
        view = memoryview(piece)
        while view:
            if not self.rest:
                view = self._add(view, HEADER.size)
                if len(self._begun) < HEADER.size:
                    return
                kind, length = _header(self._begun)
                if kind not in self._in_parts or not length:
                    whole = HEADER.size + length
                    view = self._add(view, whole)
                    if len(self._begun) < whole:
                        return
                    payload = bytes(memoryview(self._begun)[HEADER.size :])
                    self._begun = bytearray()
                    yield kind, payload
                    continue
                self._begun.clear()
                self.passing, self.rest = kind, length
            part, view = view[: self.rest], view[self.rest :]
            self.rest -= len(part)
            if part:
                yield self.passing, bytes(part)

    def took(self, size: int) -> None:
        """Count bytes of `rest` that were taken off the stream by others."""
        self.rest -= size

    def _add(self, view: memoryview, size: int) -> memoryview:
        """Let the frame that was begun become so large, and return what is left of `view`."""
        missing = max(size - len(self._begun), 0)
        self._begun += view[:missing]
        return view[missing:]


def _header(buffer: bytearray) -> tuple[FrameKind, int]:
    number, length = HEADER.unpack_from(buffer)
    if length > LARGEST_FRAME:
        raise BadFrame(f"a frame of {length} bytes")
    return _kind(number), length


def _kind(number: int) -> FrameKind:
    try:
        return FrameKind(number)
    except ValueError:
        raise BadFrame(f"a frame of unknown kind {number}") from None
