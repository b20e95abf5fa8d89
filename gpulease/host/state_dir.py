"""The state directory: made, checked, and held by one daemon at a time."""

import errno
import fcntl
import logging
import os
from pathlib import Path

from gpulease.config import DATABASE_NAME
from gpulease.errors import StateUnusable, state_fault
from gpulease.path_ownership import make_directories, shaky
from gpulease.shim.record import is_alive, read_record
from gpulease.user_daemon import IN_USE, LOCK

_log = logging.getLogger(__name__)

JOBS = "jobs"
"""Where in it the directories of the jobs are."""
UNMANAGED = "unmanaged"
"""A file in the directory of a job that runs and that `recover` could not take into the record."""


class StateDirectory:
    """The directory of one daemon; the kernel drops the lock on it with the process."""

    def __init__(self, path: Path) -> None:
        """Make the directory at `path` if need be, and take it.

        Raises:
            StateUnusable: it cannot be made or written, or another daemon holds it.
            StateUnwritable: it cannot be written at this moment.
        """
        self.path = path
        self.jobs = path / JOBS
        self._refuse_shaky_ground()
        try:
            make_directories(path.parent, 0o755 if os.geteuid() == 0 else 0o700)
            # Others may pass through to the socket of a job that is theirs, and list nothing.
            for directory in (path, self.jobs):
                directory.mkdir(exist_ok=True)
                directory.chmod(0o711)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / LOCK, flags, 0o600)
        except OSError as error:
            raise state_fault(f"cannot use the state directory {path}", error) from error
        self._take()

    def _refuse_shaky_ground(self) -> None:
        """Refuse a directory that somebody else made, or could put another in the place of."""
        for part in (self.path, *(self.path / name for name in (JOBS, LOCK, DATABASE_NAME))):
            if (why := shaky(part, os.geteuid())) is not None:
                raise StateUnusable(
                    f"cannot use the state directory {self.path}: {why}",
                    "what is kept there decides what is run as whom: see that nobody else may "
                    "write it or any folder above it, or give another with --state",
                )

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise StateUnusable(
                f"cannot use the state directory {self.path}: {IN_USE}",
                "one daemon serves the whole machine: stop that one first; "
                "for a second one beside it give another --state",
            ) from None

    def ensure_jobs(self) -> None:
        """Make the directory of the jobs again if it was removed while the daemon uses it.

        Raises:
            OSError: it cannot be made; the state directory may have been moved.
        """
        try:
            self.jobs.mkdir(mode=0o711)
        except FileExistsError:
            return
        self.jobs.chmod(0o711)
        _log.warning("%s was removed while in use, and is made again", self.jobs)

    def job(self, job: int) -> Path:
        """Return the directory of a job, which need not be there."""
        return self.jobs / str(job)

    def last_job(self) -> int:
        """Return the highest id that a job's directory is named after; 0 if there is none."""
        return max(
            (int(each.name) for each in self.jobs.iterdir() if each.name.isdecimal()), default=0
        )

    def running(self) -> list[int]:
        """Return the ids of the jobs that run and belong in the record; reads no database."""
        numbers = sorted(int(each.name) for each in self.jobs.iterdir() if each.name.isdecimal())
        return [number for number in numbers if _runs(self.job(number))]

    def close(self) -> None:
        """Let another daemon have it."""
        os.close(self._lock)


def _runs(directory: Path) -> bool:
    # Asked first: the record of a shim that has gone is final.
    if not is_alive(directory) or (directory / UNMANAGED).exists():
        return False
    record = read_record(directory)
    return record is not None and record.exited is None
