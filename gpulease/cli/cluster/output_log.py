"""Files with the output of jobs, in the home that the nodes share.

`gpulease logs` reads them on any node: JOB.log for a job in the foreground, which this command
writes, and JOB.out and JOB.err for a batch job, which Slurm writes.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_KEPT_FOR_S = 30 * 24 * 3600


def output_directory() -> Path:
    """Make the directory of these files, and return it; files of long ago are removed.

    Raises:
        OSError: it cannot be made.
    """
    from gpulease.cli.cluster.output import foreground_log

    folder = foreground_log("").parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "Permission denied", str(folder))
    oldest = time.time() - _KEPT_FOR_S
    for entry in os.scandir(folder):
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < oldest:
                Path(entry.path).unlink()
    return folder


class OutputLog:
    """The output of a job in the foreground, both streams as they arrived."""

    def __init__(self, job: int, say: Callable[[str], None]) -> None:
        """Create the file. Raises: OSError."""
        path = output_directory() / f"{job}.log"
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._say = say

    def write(self, piece: bytes) -> None:
        """Append output; after a failure, no more is written."""
        if self._fd is None:
            return
        try:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._say(f"gpulease: the log of the job ends here: {error.strerror}")
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
