"""Bytes that wait to be written, in the order in which they came, and copied as little as may be.

Standard library only: the shim imports this, and the command's every-day path.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice

Piece = bytes | bytearray | memoryview

_SMALL = 4096
"""Bytes; what is smaller is put together, or a million single bytes would take 100 MB."""
_LARGE = 64 << 10
"""Bytes; what was put together from so much is left at that."""
_MOST_AT_ONCE = 64
"""Buffers in one call; the system's own limit is 1024."""


class Backlog:
    """A queue of bytes."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that wait."""
        self._pieces: deque[Piece] = deque()

    def add(self, piece: Piece) -> None:
        """Append `piece`; what may change afterwards, a view or a bytearray, is copied."""
        self.size += len(piece)
        if len(piece) >= _SMALL:
            self._pieces.append(bytes(piece))
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < _LARGE:
            last += piece
        elif piece:
            self._pieces.append(bytearray(piece))

    def write(self, writer: Callable[[list[Piece]], int]) -> None:
        """Hand the first of it to `writer`, which returns how many bytes it took."""
        self._drop(writer(list(islice(self._pieces, _MOST_AT_ONCE))))

    def clear(self) -> None:
        """Forget all of it."""
        self._pieces.clear()
        self.size = 0

    def _drop(self, size: int) -> None:
        self.size -= size
        while size and len(self._pieces[0]) <= size:
            size -= len(self._pieces.popleft())
        if size:
            self._pieces[0] = memoryview(self._pieces[0])[size:]
