"""Records which bytes of a lease each process of its job has taken, as locks that the kernel drops.

The ledger of a job is a FIFO that the daemon creates. A leased GPU is a range of offsets in it, and
a byte of its memory is one offset. A process that takes memory locks as many free offsets (record
locks, fcntl(2)). So no byte is taken twice, and the kernel frees what a process has taken when the
process ends, however that happens. A FIFO stores nothing: users cannot fill the daemon's disk.

A process loses its locks when it closes any descriptor of the file, and a script may do that: it
closes all descriptors, or opens and closes each entry of /proc/self/fd. So each use checks that the
descriptor is still the file's, and locks again what this process has taken, except what another
process has taken meanwhile. Locks of open file descriptions (F_OFD_SETLK) would stay, but a forked
child would keep them after the end of its parent, and no refusal could name the holder. A forked
child inherits no locks.
"""

import fcntl
import os
import select
import struct
import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

_FLOCK = "hhqqi"
"""struct flock: type, whence, start, length, pid."""
_BITS = 44
"""A GPU has 2**44 offsets, from this many times its place plus one; control bytes are below."""
_WAKEUP, _LONGEST = b"!", 4096
_HIGH = 500
"""The least number of the descriptor, if the limit allows it: scripts close and reuse low ones."""
_LOCK_EVERY = 5.0
_LOOK_EVERY = 0.01
WAIT_FOR_TURN = 3.0
"""Seconds that a process waits for its turn. The process that has it may be stopped."""
_PRESENCE_BITS = 20
_KIND_BITS = 10

Range = Tuple[int, int]


class Taken(NamedTuple):
    """Bytes that a process has taken on a GPU; pid 0: in another pid namespace."""

    pid: int
    size: int


class Ledger:
    """The ledger of one job, in this process; without a path, only what this process takes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: Optional[int] = None
        self._file: Optional[Tuple[int, int]] = None
        self._own: Dict[int, List[Range]] = {}
        self._marks: Dict[int, int] = {}
        self._state = threading.RLock()

    def open(self) -> None:
        """Open the file unless it is open, and lock again what this process has taken.

        Raises:
            OSError: it cannot be opened or locked.
        """
        with self._state:
            if self._path and self._is_open():
                self._lock_again()
            self._descriptor()

    def _descriptor(self) -> Optional[int]:
        """Return the descriptor, of a file opened again if a script has closed it."""
        with self._state:
            if self._path and not self._is_open():
                flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = _moved_up(os.open(self._path, flags))
                self._file = _identity(self._fd)
                self._lock_again()
            return self._fd

    def _is_open(self) -> bool:
        try:
            return self._fd is not None and _identity(self._fd) == self._file
        except OSError:
            return False

    def _lock_again(self) -> None:
        for ranges in self._own.values():
            free = [gap for each in ranges for gap in self._gaps(each[0], each[1], [])]
            ranges[:] = [each for each in free if self._try_lock(*each)]
        for at in self._marks.values():
            self._try_lock(at, at + 1)

    def give_up(self) -> None:
        """Do without the file from now on."""
        self._path, self._fd = "", None

    def is_shared(self) -> bool:
        """Tell whether other processes are counted: there is a file."""
        return self._fd is not None

    def wake(self) -> None:
        """Wake the processes in `wait_for_wakeup`, and keep them awake until `end_wakeup`."""
        fd = self._descriptor()
        if fd is not None and not _has_data(fd, 0):
            os.write(fd, _WAKEUP)

    def end_wakeup(self) -> None:
        """End what `wake` has begun."""
        fd = self._descriptor()
        try:
            if fd is not None:
                os.read(fd, _LONGEST)
        except BlockingIOError:
            pass  # nobody has called `wake`

    def wait_for_wakeup(self) -> None:
        """Return while another process calls `wake`, or after some seconds."""
        self.open()
        fd = self._descriptor()
        if fd is not None:
            _has_data(fd, _LOCK_EVERY)

    @contextmanager
    def turn(self, place: int) -> Iterator[None]:
        """Be the only process that takes memory of the GPU at `place`, to take it in order.

        After WAIT_FOR_TURN seconds it begins without its turn: no byte can be taken twice.

        Raises:
            OSError: the file cannot be opened or locked.
        """
        self.open()
        deadline = time.monotonic() + WAIT_FOR_TURN
        while not self._try_lock(place, place + 1) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        try:
            yield
        finally:
            self._unlock(place, place + 1)

    def turns(self) -> List[int]:
        """Return the places of the GPUs of which other processes are taking memory."""
        return [place for place, _, _ in self._others(0, 1 << _PRESENCE_BITS)]

    def resize(self, place: int, size: int, capacity: int) -> int:
        """Take as much of `size` bytes as is free, or give back down to it; return the result."""
        with self._state:
            ranges = self._own.setdefault(place, [])
            while _size(ranges) > size:
                start, end = ranges.pop()
                kept = max(start, end - (_size(ranges) + end - start - size))
                self._unlock(kept, end)
                if kept > start:
                    ranges.append((start, kept))
            base = (place + 1) << _BITS
            for start, end in self._gaps(base, base + capacity, ranges):
                taken = min(end, start + size - _size(ranges))
                if taken > start and self._try_lock(start, taken):
                    ranges.append((start, taken))
            return _size(ranges)

    def holders(self, place: int, capacity: int) -> List[Taken]:
        """Return what other processes have taken, the most first."""
        base = (place + 1) << _BITS
        sizes = {}  # type: Dict[int, int]
        for start, end, pid in self._others(base, base + capacity):
            sizes[pid] = sizes.get(pid, 0) + end - start
        return sorted((Taken(*each) for each in sizes.items()), key=lambda one: -one.size)

    def mark(self, place: int, kind: int) -> None:
        """Show other processes a pool of this one on the GPU at `place`, of the kind `kind`."""
        with self._state:
            base = _marks_at(place, kind)
            at = base
            while at in self._marks.values() or not self._try_lock(at, at + 1):
                at += 1
                if at == base + (1 << _KIND_BITS):
                    return  # so many that one more makes no difference
            self._marks[base] = at

    def unmark(self, place: int, kind: int) -> None:
        """Remove the mark of a pool."""
        with self._state:
            at = self._marks.pop(_marks_at(place, kind), None)
            if at is not None:
                self._unlock(at, at + 1)

    def marked(self, place: int, kind: int) -> int:
        """Return how many pools of the kind `kind` other processes show there."""
        base = _marks_at(place, kind)
        return _size(each[:2] for each in self._others(base, base + (1 << _KIND_BITS)))

    def _gaps(self, start: int, end: int, own: List[Range]) -> List[Range]:
        """Return the parts of a range that no process has locked."""
        found = []
        for low, high in sorted([each[:2] for each in self._others(start, end)] + own):
            found.append((start, low))
            start = max(start, high)
        return [each for each in found + [(start, end)] if each[1] > each[0]]

    def _others(self, start: int, end: int) -> List[Tuple[int, int, int]]:
        """Return the locks of other processes within a range: (start, end, pid)."""
        fd, found, pending = self._descriptor(), [], [(start, end)]
        while pending and fd is not None:
            start, end = pending.pop()
            if start == end:
                continue
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
            kind, _, at, length, pid = struct.unpack(_FLOCK, answer)
            if kind != fcntl.F_UNLCK:
                low, high = max(start, at), min(end, at + length if length else end)
                found.append((low, high, max(0, pid)))
                pending += [(start, low), (high, end)]
        return found

    def _try_lock(self, start: int, end: int) -> bool:
        fd = self._descriptor()
        if fd is None:
            return True
        try:
            flags = fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(fd, flags, end - start, start, os.SEEK_SET)
        except (BlockingIOError, PermissionError):  # taken; which of them is up to the system
            return False
        return True

    def _unlock(self, start: int, end: int) -> None:
        fd = self._descriptor()
        if fd is not None:
            fcntl.lockf(fd, fcntl.LOCK_UN, end - start, start, os.SEEK_SET)


def _moved_up(fd: int) -> int:
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:
        return fd  # the process may not have so many
    os.close(fd)
    return high


def _has_data(fd: int, seconds: float) -> bool:
    waiting = select.poll()  # select() takes no descriptor above 1023
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _identity(fd: int) -> Tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _marks_at(place: int, kind: int) -> int:
    return (place + 1) << _PRESENCE_BITS | kind << _KIND_BITS


def _size(ranges: "Iterator[Range] | List[Range]") -> int:
    return sum(end - start for start, end in ranges)
