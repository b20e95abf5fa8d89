"""The files by which personal daemons of several users announce what they lease.

One file for each user in /dev/shm, which belongs to root and is sticky: nobody can remove or
replace the file of another user. There is no lock. A daemon writes what it wants, then reads what
the others have written, and keeps its leases only if all fit. Of two daemons that want the same
memory at the same time, each writes before it reads, so at least one of them sees the other.

A file counts only while the process that wrote it lives: a daemon that was killed announces
nothing. Users are trusted to announce the truth about themselves, as on any machine where GPUs are
open to all; what a process really uses is read from the driver.
"""

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
_NAME = re.compile(r"gpulease-(\d+)\.leases")
_MOST_BYTES = 64 << 10
_MOST_FILES = 1000
_MOST_MEMORY = 1 << 50
"""Bytes of one GPU; a larger figure is no figure."""
_NO_CONTENT = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What a file raises that cannot be read or was not written by a daemon."""


class NeighbourFiles:
    """Announces what this daemon leases, and reads what those of other users do."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._file = folder / f"gpulease-{os.getuid()}.leases"
        self._announced: tuple[NeighbourLease, ...] = ()
        self._failed = False

    def announce(self, leases: tuple[NeighbourLease, ...]) -> None:
        """Write what this daemon leases, if that has changed; without leases, remove the file."""
        if leases == self._announced:
            return
        own = entry(os.getpid())
        by_gpu = {each.gpu: [each.memory, sorted(each.pids)] for each in leases}
        started = own.started if own is not None else 0
        text = json.dumps({"pid": os.getpid(), "started": started, "leases": by_gpu})
        part = self._file.with_suffix(".part")
        try:
            (part if leases else self._file).unlink(missing_ok=True)
            if not leases:
                self._announced = ()
                return
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, text.encode())
                os.fchmod(descriptor, 0o644)  # whatever the umask: others have to read it
            finally:
                os.close(descriptor)
            part.replace(self._file)
        except OSError as error:
            if not self._failed:
                _log.warning("cannot announce leases to the daemons of other users: %s", error)
            self._failed = True
            return
        self._announced, self._failed = leases, False

    def leases(self) -> Sequence[NeighbourLease]:
        """Return what the living daemons of other users lease."""
        found: list[NeighbourLease] = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            named = ((_NAME.fullmatch(each.name), each.path) for each in entries)
            ours = str(os.getuid())
            files = [(int(m[1]), path) for m, path in named if m is not None and m[1] != ours]
            for uid, path in files[:_MOST_FILES]:
                with suppress(*_NO_CONTENT):
                    found += _leases(uid, _content(uid, path))
        return found


def _content(uid: int, path: str) -> Any:
    """Read the file of a user, which nobody else has written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not that user's, or too large, or no JSON.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != uid or not stat.S_ISREG(status.st_mode):
            raise ValueError(path)
        return json.loads(os.read(descriptor, _MOST_BYTES))
    finally:
        os.close(descriptor)


def _leases(uid: int, content: Mapping[str, Any]) -> Iterator[NeighbourLease]:
    """Yield what a file announces, if the daemon that wrote it lives."""
    pid = int(content["pid"])
    daemon = entry(pid)
    if daemon is None or daemon.zombie or daemon.started != content["started"]:
        return
    if real_uid(pid) != uid:
        return
    for gpu, (memory, pids) in content["leases"].items():
        if 0 < memory <= _MOST_MEMORY:
            yield NeighbourLease(uid, GpuUuid(gpu), int(memory), frozenset(map(int, pids)))
