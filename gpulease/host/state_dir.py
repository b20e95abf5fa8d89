"""The state directory: create it, check who may write to it, and lock it for one daemon.

Also the ledger, a file in the directory of each job.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from gpulease.config import DATABASE_NAME
from gpulease.domain.gpu import JobId
from gpulease.errors import StateUnusable, state_fault
from gpulease.path_ownership import make_directories, shaky
from gpulease.shim.record import is_alive, read_record
from gpulease.user_daemon import IN_USE, LOCK

_log = logging.getLogger(__name__)

JOBS = "jobs"
"""The directory in it with the directories of the jobs."""
CRASH = "crash"
"""A file in it to which Python writes where a signal such as SIGSEGV ended the daemon."""
UNMANAGED = "unmanaged"
"""A file in the directory of a running job that `recover` could not add to the database."""


_LOCK_WITHIN_S, _LOCK_EVERY_S = 0.5, 0.01
"""A child that a killed daemon has just forked has the lock until it executes its program, and a
command that looks for a personal daemon tries the lock."""


class StateDirectory:
    """The directory of one daemon. The kernel releases its lock when the process ends."""

    def __init__(self, path: Path, lock_within_s: float = _LOCK_WITHIN_S) -> None:
        """Create the directory at `path` if it is missing, and lock it.

        Raises:
            StateUnusable: it cannot be created or written, or another daemon has locked it.
            StateUnwritable: it cannot be written at this moment.
        """
        self.path = path
        self.jobs = path / JOBS
        self._check_ownership()
        try:
            make_directories(path.parent, 0o755 if os.geteuid() == 0 else 0o700)
            # Users may reach the sockets of their jobs, but not list the directories.
            for directory in (path, self.jobs):
                directory.mkdir(exist_ok=True)
                directory.chmod(0o711)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / LOCK, flags, 0o600)
        except OSError as error:
            raise state_fault(f"cannot use the state directory {path}", error) from error
        self._lock_directory(lock_within_s)

    def _check_ownership(self) -> None:
        """Refuse a directory that another user created or could replace."""
        for part in (self.path, *(self.path / name for name in (JOBS, LOCK, DATABASE_NAME))):
            if (why := shaky(part, os.geteuid())) is not None:
                raise StateUnusable(
                    f"cannot use the state directory {self.path}: {why}",
                    "its contents decide which commands run as which user: make sure that no other "
                    "user may write to it or to a directory above it, or use another with --state",
                )

    def _lock_directory(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        while not self._is_locked():
            if time.monotonic() >= until:
                os.close(self._lock)
                raise StateUnusable(
                    f"cannot use the state directory {self.path}: {IN_USE}",
                    "one daemon serves the whole machine: stop the other one first, or run a "
                    "second one with another --state",
                )
            time.sleep(_LOCK_EVERY_S)

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            os.close(self._lock)
            raise
        return True

    def ensure_jobs(self) -> None:
        """Create the directory of the jobs again if it was removed.

        Raises:
            OSError: it cannot be created; the state directory may have been moved.
        """
        try:
            self.jobs.mkdir(mode=0o711)
        except FileExistsError:
            return
        self.jobs.chmod(0o711)
        _log.warning("%s was removed while in use; created it again", self.jobs)

    def job(self, job: int) -> Path:
        """Return the directory of a job, which may not exist."""
        return self.jobs / str(job)

    def numbers(self) -> list[JobId]:
        """Return the ids of the jobs that have a directory."""
        # A path for each would take ten times as long.
        return [JobId(int(name)) for name in os.listdir(self.jobs) if name.isdecimal()]  # noqa: PTH208

    def running(self, numbers: Iterable[JobId]) -> list[JobId]:
        """Return those of the jobs that run and belong in the database, which is not read."""
        return [number for number in sorted(numbers) if _runs(f"{self.jobs}/{number}")]

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)


def _runs(directory: str) -> bool:
    # The lock first: the record of a shim that has ended is final.
    if not is_alive(directory) or Path(directory, UNMANAGED).exists():
        return False
    record = read_record(directory)
    return record is not None and record.exited is None


def ensure_ledger(directory: Path, owner: tuple[int, int] | None) -> str:
    """Create the file by which the processes of a job share its lease; return its path.

    See worker/hooks/_gpulease_hooks/ledger.py. `owner` is the uid and gid of the job's user; None
    for those of this process. A failure is logged only: the hooks report that they find no ledger.
    """
    path = directory / "ledger"
    try:
        if path.is_symlink() or not path.is_fifo():
            directory.mkdir(mode=0o711, exist_ok=True)
            # A FIFO: in the state directory a user must not be able to store data.
            os.mkfifo(path, 0o600)
            if owner is not None:
                os.chown(path, *owner, follow_symlinks=False)
    except OSError as error:
        _log.warning("cannot create %s: %s", path, error.strerror)
    return str(path)
