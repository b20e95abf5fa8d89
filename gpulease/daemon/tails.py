"""The end of what a job wrote, for those who want to know why it ended.

The files are the shim's and in a directory of the daemon's, so no name in it is the user's; what
they hold is, and is taken for text of any kind.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from gpulease.domain.memory import JobId

_LONGEST = 64 << 10
"""Bytes of each stream: a traceback of PyTorch or of XLA is some tens of lines."""


class Tails:
    """Reads the ends of jobs' logs, away from the event loop."""

    def __init__(self, directory_of: Callable[[JobId], Path]) -> None:
        self._directory_of = directory_of

    async def of(self, job: JobId) -> str:
        """Return the end of both streams, or nothing where there is nothing to be read."""
        directory = self._directory_of(job)
        return await asyncio.to_thread(
            lambda: "\n".join(_tail(directory / name) for name in ("stdout", "stderr"))
        )


def _tail(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, _LONGEST, max(0, size - _LONGEST)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
