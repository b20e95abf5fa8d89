"""Where the last lines of a job's output begin, for the daemon and for `logs` on a cluster."""

from __future__ import annotations

import os

_PIECE = 64 * 1024


def start_of_tail(file: int, lines: int, end: int, first: int = 0) -> int:
    """Return where the last `lines` lines of an open file begin.

    The file counts up to `end`, and is kept from `first` on.
    """
    if lines == 0:
        return end
    at, found = end, 0
    while at > first:
        start = max(first, at - _PIECE)
        piece = os.pread(file, at - start, start)
        # The line break at the end of the file ends its last line.
        cut = len(piece) - (at == end and piece.endswith(b"\n"))
        # Counting is fast, and there may be a hundred million lines.
        if found + (here := piece.count(b"\n", 0, cut)) < lines:
            found, at = found + here, start
            continue
        while (cut := piece.rfind(b"\n", 0, cut)) >= 0:
            found += 1
            if found == lines:
                return start + cut + 1
        at = start
    return first
