"""Reads of /proc/PID that the process itself can hold up, with a deadline.

The kernel reads `environ`, `cmdline` and `maps` under the lock of the process's memory map, and a
process may hold that lock for as long as a file system pleases that it maps a file of: one of its
own (FUSE), or one whose server is gone (NFS). Whoever reads then waits with it, for ever.

So each such read is made by a thread that may be left behind. The wait in the kernel ends with a
fatal signal, so that such a thread keeps no daemon from ending. A process that keeps one is not
read again before it lets go, and a user's processes keep a few threads at most: of that user no
others are read meanwhile.
"""

import os
import threading
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from gpulease.shim.process_tree import entry

_WITHIN_S = 1.0
"""The kernel answers in microseconds; a machine under load may take its time to wake a thread."""
_NEXT_WITHIN_S = 0.05
"""For a user some of whose processes hold a read up."""
_MOST_HELD_UP = 4
"""Of one user's."""
_PIECE = 1 << 16

Read = tuple[Future[bytes], str, int]


class _HeldUp(NamedTuple):
    """A read that has not come back, and the thread that is left behind with it."""

    uid: int | None
    read: Future[bytes]
    worker: "SimpleQueue[Read]"


class PatientReader:
    """Reads files of /proc, as many at once as there are callers."""

    def __init__(self, proc: Path = Path("/proc"), within_s: float = _WITHIN_S) -> None:
        self._proc = str(proc)
        self._within_s = within_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Read]] = []
        self._held_up: dict[tuple[int, int], _HeldUp] = {}
        """By pid and start time."""

    @property
    def is_held_up(self) -> bool:
        """Say whether some read has not come back."""
        with self._lock:
            return any(not each.read.done() for each in self._held_up.values())

    def read(self, pid: int, name: str, most: int) -> bytes | None:
        """Return up to `most` bytes of /proc/`pid`/`name`.

        None where it may not be read, is gone, or does not let itself be read now.
        """
        found = entry(pid)
        if found is None:
            return None
        key, uid = (pid, found.started), real_uid(pid)
        within_s = self._patience(key, uid)
        if within_s is None:
            return None
        future: Future[bytes] = Future()
        worker = self._worker()
        worker.put((future, f"{self._proc}/{pid}/{name}", most))
        try:
            content = future.result(timeout=within_s)
        except FutureTimeout:
            with self._lock:
                self._held_up[key] = _HeldUp(uid, future, worker)
            return None
        except OSError:
            content = None
        with self._lock:
            self._idle.append(worker)
        return content

    def _patience(self, key: tuple[int, int], uid: int | None) -> float | None:
        """Return how long to wait for a process; None: it is not to be tried."""
        with self._lock:
            for other, each in list(self._held_up.items()):
                if each.read.done():
                    del self._held_up[other]
                    self._idle.append(each.worker)
            held_up = Counter(each.uid for each in self._held_up.values())
            if key in self._held_up or held_up[uid] >= _MOST_HELD_UP:
                return None
            return min(_NEXT_WITHIN_S, self._within_s) if held_up[uid] else self._within_s

    def _worker(self) -> "SimpleQueue[Read]":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        queue: SimpleQueue[Read] = SimpleQueue()
        threading.Thread(target=_serve, args=(queue,), name="proc-reader", daemon=True).start()
        return queue


def _serve(queue: "SimpleQueue[Read]") -> None:
    while True:
        future, path, most = queue.get()
        try:
            future.set_result(_content(path, most))
        except OSError as error:
            future.set_exception(error)


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
    """Return the real uid of a process, which the effective one of a setuid program is not."""
    for line in _status(pid):
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def name_of(pid: int) -> str | None:
    """Return the name of a process as the kernel has it, of at most 15 bytes."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n"))
    except OSError:
        return None


def _status(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return []


_reader = PatientReader()


def read(pid: int, name: str, most: int = 8 << 20) -> bytes | None:
    """Return what `PatientReader.read` does, of the one for this process."""
    return _reader.read(pid, name, most)


def command_of(pid: int) -> tuple[str, ...] | None:
    """Return the arguments of a process; empty for a kernel thread, None where they are kept."""
    content = read(pid, "cmdline")
    if not content:
        return None if content is None else ()
    words = content.removesuffix(b"\0").split(b"\0")
    if len(words) == 1:
        # Many a server writes a sentence over its arguments.
        words = words[0].split(b" ")
    return tuple(map(os.fsdecode, words))
