"""Tells what a task prolog that fails prints from the output of the job, which it replaces.

Slurm has one place for both: the standard output of the job.
"""

import re

from gpulease.wire.frames import FrameKind

_BEGINS = b"gpulease: "
_FAILED = re.compile(rb"[^\n]*: error: TaskProlog failed[^\n]*\n?")


class PrologWords:
    """Withholds output that begins as the words of the prolog, until it is clear whose it is."""

    def __init__(self) -> None:
        self.failed = False
        """The prolog failed: Slurm does not start the command."""
        self._held = b""
        self._is_of_job = False

    def take(self, kind: FrameKind, piece: bytes) -> bytes:
        """Return what of a piece, and of what was withheld before, is output of the job."""
        if b"TaskProlog failed" in piece:
            self.failed = True
            piece = _FAILED.sub(b"", piece)
        if kind == FrameKind.STDERR or self._is_of_job:
            return piece
        self._held += piece
        return b"" if self._held.startswith(_BEGINS[: len(self._held)]) else self.release()

    def release(self) -> bytes:
        """Return what is withheld, as output of the job; from now on nothing is."""
        self._is_of_job = True
        held, self._held = self._held, b""
        return held

    @property
    def text(self) -> str:
        """The words of a prolog that failed."""
        return self._held.decode(errors="replace").replace("\r\n", "\n").strip()
