"""Read files in /proc/PID that the process itself can block, with a time limit.

The kernel reads `environ`, `cmdline` and `maps` under the lock of the process's memory map. A
process may hold that lock as long as a file system from which it maps a file does not answer, such
as its own (FUSE) or one without a server (NFS). The reader waits as long.

So each read is made by a thread that may be abandoned. A fatal signal ends the wait in the kernel,
so such a thread does not keep the daemon from ending. A process that blocks a read is not read
again until that read returns. If the processes of one user block a few reads, no other process of
that user is read meanwhile.
"""

import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpulease.call_thread import Call, CallThread
from gpulease.shim.process_tree import entry, read_proc

_WITHIN_S = 1.0
"""The kernel answers in microseconds, but a loaded machine may take longer to wake a thread."""
_NEXT_WITHIN_S = 0.05
"""Time for a process of a user who blocks another read."""
_MOST_BLOCKED = 4
"""Blocked reads of one user."""
_PIECE = 1 << 16


class _BlockedRead(NamedTuple):
    """A read that has not returned, and its thread."""

    uid: int | None
    call: Call[bytes]
    thread: CallThread[bytes]


class ProcReader:
    """Reads files in /proc, as many at once as there are callers."""

    def __init__(self, proc: Path = Path("/proc"), within_s: float = _WITHIN_S) -> None:
        self._proc = str(proc)
        self._within_s = within_s
        self._lock = threading.Lock()
        self._idle: list[CallThread[bytes]] = []
        self._blocked: dict[tuple[int, int], _BlockedRead] = {}
        """By pid and start time."""

    def read(self, pid: int, name: str, most: int) -> bytes | None:
        """Return up to `most` bytes of /proc/`pid`/`name`.

        None if the file is gone, may not be read, or blocks.
        """
        within_s = self._time_for(pid)
        if within_s is None:
            return None
        with self._lock:
            thread = self._idle.pop() if self._idle else CallThread("proc-reader")
        call = thread.submit(partial(_content, f"{self._proc}/{pid}/{name}", most))
        if not call.wait(within_s):
            key, uid = _owned(pid)
            with self._lock:
                self._blocked[key] = _BlockedRead(uid, call, thread)
            return None
        with self._lock:
            self._idle.append(thread)
        try:
            return call.outcome.result()
        except OSError:
            return None

    def _time_for(self, pid: int) -> float | None:
        """Return how long to wait for a process, in seconds; None to skip it."""
        # Who it is matters only while a read is blocked, and costs more than most reads.
        if not self._blocked:
            return self._within_s
        key, uid = _owned(pid)
        with self._lock:
            for other, each in list(self._blocked.items()):
                if each.call.outcome.done():
                    del self._blocked[other]
                    self._idle.append(each.thread)
            blocked = Counter(each.uid for each in self._blocked.values())
            if key in self._blocked or blocked[uid] >= _MOST_BLOCKED:
                return None
            return min(_NEXT_WITHIN_S, self._within_s) if blocked[uid] else self._within_s


def _owned(pid: int) -> tuple[tuple[int, int], int | None]:
    """Return the pid and start of a process, and its user."""
    found = entry(pid)
    return (pid, -1 if found is None else found.started), real_uid(pid)


def _content(path: str, most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces: list[bytes] = []
        while most > 0 and (piece := os.read(descriptor, min(most, _PIECE))):
            pieces.append(piece)
            most -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def real_uid(pid: int) -> int | None:
    """Return the real uid of a process. The effective one of a setuid program may differ."""
    uids = uids_of(pid)
    return uids[0] if uids else None


def uids_of(pid: int) -> list[int]:
    """Return the real, effective, saved and file system uid of a process; none if it has ended."""
    line = read_proc(f"/proc/{pid}/status").partition(b"\nUid:")[2].partition(b"\n")[0]
    return [int(uid) for uid in line.split()]


def name_of(pid: int) -> str:
    """Return the name that the kernel has for a process, of at most 15 bytes; empty if it ended."""
    return os.fsdecode(read_proc(f"/proc/{pid}/comm").removesuffix(b"\n"))


_reader = ProcReader()


def read(pid: int, name: str, most: int = 8 << 20) -> bytes | None:
    """Return the result of `ProcReader.read` from the reader that this process shares."""
    return _reader.read(pid, name, most)


def command_of(pid: int) -> tuple[str, ...] | None:
    """Return the arguments of a process; empty for a kernel thread, None if unreadable."""
    content = read(pid, "cmdline")
    if not content:
        return None if content is None else ()
    words = content.removesuffix(b"\0").split(b"\0")
    if len(words) == 1:
        # Many servers overwrite their arguments with one string.
        words = words[0].split(b" ")
    return tuple(map(os.fsdecode, words))
