"""The files by which personal daemons of several users announce what they lease.

One directory for each user in /dev/shm, which belongs to root and is sticky: nobody can remove or
replace what another user has there. There is no lock. A daemon writes what it wants, then reads
what the others have written, and keeps its leases only if all fit. Of two that want the same
memory at the same time, each writes before it reads, so at least one of them sees the other.

The directories are there before anything is wanted, and stay while something is leased: a listing
of /dev/shm may miss a name that is renamed meanwhile, and never misses these.

A file counts only while the process that wrote it lives: a daemon that was killed announces
nothing. Users are trusted to announce the truth about themselves, as on any machine where GPUs are
open to all; what a process really uses is read from the driver.
"""

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpulease.domain.gpu import GpuUuid, NeighbourLease
from gpulease.host.proc_reader import real_uid
from gpulease.shim.process_tree import entry

_log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108  the protocol needs a directory that all users share
_NAME = re.compile(r"gpulease-(0|[1-9]\d*)")
_MOST_BYTES = 64 << 10
_MOST_USERS = 1000
_MOST_MEMORY = 1 << 50
"""Bytes of one GPU; a larger figure is no figure."""
_NO_CONTENT = (
    OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What a file raises that cannot be read or was not written by a daemon."""


class NeighbourFiles:
    """Announces what this daemon leases, and reads what those of other users do."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._own = folder / f"gpulease-{os.getuid()}"
        self._announced: tuple[NeighbourLease, ...] | None = ()
        """None: what is announced is not known, since it could not be written."""

    def announce(self, leases: tuple[NeighbourLease, ...]) -> None:
        """Write what this daemon leases, or remove the file if that is nothing.

        It is written again if somebody has removed it: systemd-logind may do so at a logout. Where
        it cannot be written, this daemon goes on, and respects what others announce.
        """
        file = self._own / "leases"
        if leases == self._announced and (not leases or file.exists()):
            return
        try:
            if leases:
                self._write(file, leases)
            else:
                file.unlink(missing_ok=True)
                with suppress(OSError):
                    self._own.rmdir()
        except OSError as error:
            if self._announced is not None:
                _log.warning("cannot announce leases to the daemons of other users: %s", error)
            self._announced = None
            return
        self._announced = leases

    def _write(self, file: Path, leases: tuple[NeighbourLease, ...]) -> None:
        own = entry(os.getpid())
        by_gpu = {each.gpu: [each.memory, sorted(each.pids)] for each in leases}
        started = own.started if own is not None else 0
        text = json.dumps({"pid": os.getpid(), "started": started, "leases": by_gpu})
        _make(self._own)
        part = self._own / "part"
        part.write_bytes(text.encode())
        part.chmod(0o644)  # whatever the umask: others have to read it
        part.replace(file)

    def leases(self) -> Sequence[NeighbourLease]:
        """Return what the living daemons of other users lease."""
        found: list[NeighbourLease] = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            named = ((_NAME.fullmatch(each.name), each.path) for each in entries)
            users = ((int(match[1]), path) for match, path in named if match is not None)
            files = [each for each in users if each[0] != os.getuid()]
            for uid, path in files[:_MOST_USERS]:
                with suppress(*_NO_CONTENT):
                    found += _leases(uid, _content(uid, path))
        return found


def _make(directory: Path) -> None:
    """Make a directory that others may read, unless it is there.

    Raises:
        OSError: it cannot be made, or is not this user's.
    """
    with suppress(FileExistsError):
        directory.mkdir()
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    directory.chmod(0o755)


def _content(uid: int, directory: str) -> Any:
    """Read the file of a user, which nobody else has written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not that user's, or too large, or no JSON.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(f"{directory}/leases", flags)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != uid or not stat.S_ISREG(status.st_mode):
            raise ValueError(directory)
        return json.loads(os.read(descriptor, _MOST_BYTES))
    finally:
        os.close(descriptor)


def _leases(uid: int, content: Mapping[str, Any]) -> Iterator[NeighbourLease]:
    """Yield what a file announces, if the daemon that wrote it lives."""
    if _lives(int(content["pid"]), content["started"], uid):
        for gpu, (memory, pids) in content["leases"].items():
            if 0 < memory <= _MOST_MEMORY:
                yield NeighbourLease(uid, GpuUuid(gpu), int(memory), frozenset(map(int, pids)))


def _lives(pid: int, started: object, uid: int) -> bool:
    """Tell whether the process lives that wrote a file.

    Where /proc hides the processes of others (hidepid), one with this pid is enough.
    """
    daemon = entry(pid)
    if daemon is not None:
        return not daemon.zombie and daemon.started == started and real_uid(pid) == uid
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False
