"""Which process a lease without a job is for: the shell that will read what `hold` prints."""

import os
import stat
from contextlib import suppress
from pathlib import Path

_INIT = 1


def reader_of_output() -> int:
    """Return the process that called us, or the one that waits for our output.

    In `eval "$(gpulease hold)"` our parent may be a copy of the shell that ends with us. All that
    runs inside the brackets writes to the pipe that we write to; the shell outside does not.
    """
    here = _pipe_of("self")
    pid = os.getppid()
    while pid > _INIT and here is not None and _pipe_of(pid) == here:
        pid = _parent_of(pid)
    return pid if pid > _INIT else os.getppid()


def name_of(pid: int) -> str | None:
    """Return the name of a process's program, such as bash; None where it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _pipe_of(pid: int | str) -> tuple[int, int] | None:
    """Return which pipe the standard output of a process is; None for anything else."""
    with suppress(OSError):
        found = Path(f"/proc/{pid}/fd/1").stat()
        if stat.S_ISFIFO(found.st_mode):
            return found.st_dev, found.st_ino
    return None


def _parent_of(pid: int) -> int:
    # The name of the program, in brackets, may hold anything.
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return _INIT
