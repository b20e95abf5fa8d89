"""The kept output of a job as a stream of frames, read from the files in the job's directory.

The shim writes the files, which belong to the daemon's user. The user of the job cannot replace
them, so root can read them safely.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from gpulease.output_tail import start_of_tail
from gpulease.wire.frames import FrameKind, frame

T = TypeVar("T")

_PIECE = 64 * 1024
_POLL_S = 0.2
_THREADS = ThreadPoolExecutor(2, "output")
"""Separate threads: many readers of a slow disk must not delay the rest of the daemon."""
_FILES = {FrameKind.STDOUT: "stdout", FrameKind.STDERR: "stderr"}


@dataclass(frozen=True, slots=True)
class OutputQuery:
    """Which part of the output to send."""

    begin: Mapping[FrameKind, int]
    """The streams to send, each from this byte on."""
    tail: int | None = None
    """The number of last lines of each stream; None: all that is kept."""
    follow: bool = False
    positions: bool = False
    """Also send the position in each stream, at the start and after each piece."""


async def frames_of(
    directory: Path, query: OutputQuery, limit: int, ended: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the output kept in `directory`, and with `follow` what is added until `ended`.

    Args:
        directory: the job's directory.
        query: which part.
        limit: the most bytes kept of each stream; earlier output is a hole in the file.
        ended: tells whether the job has ended.
    """
    streams = [
        _KeptStream(kind, directory / _FILES[kind], begin, limit)
        for kind, begin in query.begin.items()
    ]
    for stream in streams:
        await _in_thread(partial(stream.seek, query.tail, follow=query.follow))
        if query.positions:
            yield stream.position()
    while True:
        over = ended() or not query.follow
        idle = True
        for stream in streams:
            while piece := await _in_thread(stream.read):
                idle = False
                framed = stream.framed(piece)
                yield framed + stream.position() if query.positions else framed
        if over:
            return
        if idle:
            await asyncio.sleep(_POLL_S)


async def _in_thread(call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


class _KeptStream:
    """A position in one log file, which may not exist yet."""

    def __init__(self, kind: FrameKind, path: Path, begin: int, limit: int) -> None:
        self.kind = kind
        self.skipped = 0
        """Bytes before the last piece that were removed before they were read."""
        self._path = path
        self._limit = limit
        self._offset = begin
        self._end: int | None = None
        """Where to stop; None: follow the file."""

    def seek(self, lines: int | None, *, follow: bool) -> None:
        """Go to the first kept byte, or to the first of the last `lines` lines.

        Without `follow`, the present end is the end: a job may write faster than clients read.
        """
        self._end = None if follow else 0
        try:
            with self._path.open("rb") as file:
                size, first = self._extent(file.fileno(), 0)
                if lines is not None:
                    self._offset = start_of_tail(file.fileno(), lines, size, first)
                elif self._offset == 0:
                    self._offset = first
        except FileNotFoundError:
            return
        self._end = None if follow else size

    def framed(self, piece: bytes) -> bytes:
        """Return the frame of a piece, after a note if there is a gap before it."""
        note = f"[gpulease: {self.skipped} bytes are no longer kept]\n".encode()
        gap = frame(FrameKind.STDERR, note) if self.skipped else b""
        return gap + frame(self.kind, piece)

    def position(self) -> bytes:
        """Return a frame with the position."""
        at = {"kind": int(self.kind), "at": self._offset}
        return frame(FrameKind.POSITION, json.dumps(at).encode())

    def read(self) -> bytes:
        """Return the next piece, empty if there is none yet."""
        try:
            with self._path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size if self._end is None else self._end
                if self._offset >= end:
                    return b""  # also for an offset beyond any file
                # The hole reads as zeros. Its end is checked afterwards, since the job may write.
                file.seek(self._offset)
                piece = file.read(min(_PIECE, end - self._offset))
                first = self._extent(file.fileno(), self._offset)[1]
                self.skipped = max(0, first - self._offset)
                if self.skipped:
                    self._offset = first
                    file.seek(self._offset)
                    piece = file.read(max(0, min(_PIECE, end - self._offset)))
        except FileNotFoundError:
            return b""
        self._offset += len(piece)
        return piece

    def _extent(self, fd: int, begin: int) -> tuple[int, int]:
        """Return the size of the file, and the first byte from `begin` on that is still kept."""
        size = os.fstat(fd).st_size
        try:
            # Less than the limit is kept if the disk was nearly full.
            begin = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError:
            begin = min(begin, size)  # no data follows, or the file system has no SEEK_DATA
        return size, max(begin, size - self._limit)
