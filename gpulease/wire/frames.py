"""The frames that are spoken on a job's own socket, between its shim and whoever attaches.

A frame is one byte of kind, four bytes of length (unsigned, network order), and so many bytes.
Standard library only: the shim imports this, and the command's every-day path.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

HEADER = struct.Struct("!BI")
LARGEST_FRAME = 1 << 20
"""Bytes of payload; a peer that announces more is cut off."""


class FrameKind(IntEnum):
    """What a frame carries; JSON is UTF-8."""

    # From the shim.
    STDOUT = 1
    STDERR = 2
    STARTED = 3
    """JSON: {"pid": int, "started_at": str}."""
    STOPPING = 4
    """JSON: {"reason": "cancelled" | "time_limit" | "over_lease" | "idle"}: the worker was asked
    to go."""
    EXITED = 5
    """JSON: the exit record. The last frame."""
    REFUSED = 6
    """JSON: {"message": str}: this peer may not do that; the connection closes."""
    MAIN_EXITED = 7
    """JSON: {"exit_code": int} or {"signal": int}, and "at": others of its tree live on."""
    SKIPPED = 8
    """JSON: {"bytes": int}: output that a watcher was too slow for; what follows is live again."""
    SUSPENDED = 9
    """JSON: {"signal": int}: the main process was stopped, as by Ctrl-Z; SIGCONT goes on."""
    WATCHING = 10
    """JSON: {}: from now on this peer only watches, since another one writes."""
    # From who attaches.
    HELLO = 16
    """JSON: {"role": "attach" | "watch" | "control"}. The first frame.

    With "window": {"rows": int, "columns": int}, the size of the terminal that attaches.
    """
    STDIN = 17
    STDIN_END = 18
    SIGNAL = 19
    """JSON: {"signal": int}: to the worker, or to its group where a terminal would do so."""
    STOP = 20
    """JSON: {"reason": str, "grace_s": float}: SIGTERM, then SIGKILL for the whole tree."""
    TIME_LIMIT = 21
    """JSON: {"time_limit_s": float | null}, counted from the start, instead of what it was."""
    WINDOW = 22
    """JSON: {"rows": int, "columns": int}: the attached terminal has another size."""
    NOTICE = 23
    """JSON: {"text": str}: a line for the job's output, from the daemon.

    A shim from before there was this kind cuts the connection off, and does nothing else.
    """


class BadFrame(Exception):
    """The other side does not speak this protocol."""


def frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Return one encoded frame."""
    return HEADER.pack(kind, len(payload)) + payload


class FrameReader:
    """Cut a stream of bytes into frames, whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._incomplete = bytearray()

    def feed(self, piece: bytes | memoryview) -> Iterator[tuple[FrameKind, bytes]]:
        """Take in `piece` and yield each frame that is now complete; to be iterated to its end.

        Raises:
            BadFrame: the kind is unknown or the length is over `LARGEST_FRAME`.
        """
        self._incomplete += piece
        start = 0
        while (payload_at := start + HEADER.size) <= len(self._incomplete):
            kind, length = _header(self._incomplete, start)
            if payload_at + length > len(self._incomplete):
                break
            start = payload_at + length
            yield kind, bytes(memoryview(self._incomplete)[payload_at:start])
        del self._incomplete[:start]


def _header(buffer: bytearray, start: int) -> tuple[FrameKind, int]:
    number, length = HEADER.unpack_from(buffer, start)
    if length > LARGEST_FRAME:
        raise BadFrame(f"a frame of {length} bytes")
    return _kind(number), length


def _kind(number: int) -> FrameKind:
    try:
        return FrameKind(number)
    except ValueError:
        raise BadFrame(f"a frame of unknown kind {number}") from None
