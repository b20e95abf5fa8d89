"""Bytes that wait until a descriptor that does not block takes them.

Standard library only: the shim imports this, and so does `gpulease run`.
"""

from __future__ import annotations

from itertools import islice

TYPE_CHECKING = False  # `typing` takes as long to import as the interpreter to start
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
else:
    from _collections import deque

Piece = bytes | bytearray | memoryview

_SMALL = 4096
"""Bytes. Smaller pieces are joined, or a million single bytes would take 100 MB."""
_JOINED = 64 << 10
"""Bytes. A joined piece that is longer than this is not extended."""
_MOST_AT_ONCE = 64
"""Buffers in one call; the system's own limit is 1024 (IOV_MAX)."""


class WriteBuffer:
    """A queue of bytes."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes in the queue."""
        self._pieces: deque[Piece] = deque()

    def add(self, piece: Piece) -> None:
        """Append `piece`. A view or a bytearray, which may change later, is copied."""
        self.size += len(piece)
        if len(piece) >= _SMALL:
            self._pieces.append(bytes(piece))
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < _JOINED:
            last += piece
        elif piece:
            self._pieces.append(bytearray(piece))

    def write(self, writer: Callable[[list[Piece]], int]) -> None:
        """Pass everything to `writer`, which returns how many bytes it took.

        Raises:
            OSError: from `writer`, such as BlockingIOError when it takes no more for now.
        """
        while self.size:
            self.write_once(writer)

    def write_once(self, writer: Callable[[list[Piece]], int]) -> None:
        """Pass the first pieces to `writer`, which returns how many bytes it took."""
        self._drop(writer(list(islice(self._pieces, _MOST_AT_ONCE))))

    def clear(self) -> None:
        """Drop everything."""
        self._pieces.clear()
        self.size = 0

    def _drop(self, size: int) -> None:
        self.size -= size
        while size and len(self._pieces[0]) <= size:
            size -= len(self._pieces.popleft())
        if size:
            self._pieces[0] = memoryview(self._pieces[0])[size:]
