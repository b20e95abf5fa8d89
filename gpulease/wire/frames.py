"""The protocol on the socket of a job, between its shim and the clients that attach.

A frame is one byte of kind, four bytes of length (unsigned, network order), and the payload.
Standard library only: the shim imports this.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from enum import IntEnum
else:
    # The kinds are plain numbers: `enum` takes a third of the interpreter's start to import.
    IntEnum = int

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
    POSITION = 11
    """JSON: {"kind": int, "at": int}: all output of this stream before this byte was sent.

    The daemon sends it to clients that ask for it; the shim does not.
    """
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


KINDS = tuple(value for name, value in vars(FrameKind).items() if name.isupper())
"""All kinds."""


class BadFrame(Exception):
    """The peer does not follow the protocol."""


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
            kind, length = HEADER.unpack_from(self._incomplete, start)
            if length > LARGEST_FRAME:
                raise BadFrame(f"a frame of {length} bytes")
            if kind not in KINDS:
                raise BadFrame(f"a frame of unknown kind {kind}")
            if payload_at + length > len(self._incomplete):
                break
            start = payload_at + length
            yield kind, bytes(memoryview(self._incomplete)[payload_at:start])
        del self._incomplete[:start]
