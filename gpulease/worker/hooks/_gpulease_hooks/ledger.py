"""Records which bytes of a lease each process of its job has taken, as locks that the kernel drops.

The ledger of a job is a FIFO that the daemon creates. A leased GPU is a range of offsets in it, and
a byte of its memory is one offset. A process that takes memory locks as many free offsets (record
locks, fcntl(2)). So no byte is taken twice, and the kernel frees what a process has taken when the
process ends, however that happens. A FIFO stores nothing: users cannot fill the daemon's disk.

A process loses its locks when it closes any descriptor of the file. So the file is opened once and
stays open, and each use checks that a script has not closed it meanwhile. A forked child inherits
no locks.
"""

import fcntl
import os
import select
import struct
import threading
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

_FLOCK = "hhqqi"
"""struct flock: type, whence, start, length, pid."""
_BITS = 44
"""A GPU has 2**44 offsets, from this many times its place plus one; control bytes are below."""
_BELL, _LONGEST = b"!", 4096
_PRESENCE_BITS = 20
_LANE_BITS = 10

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
        """Open the file, also after a script has closed it.

        Raises:
            OSError: it cannot be opened or locked.
        """
        with self._state:
            if not self._path or self._is_open():
                return
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags)
            self._file = _identity(self._fd)
            self._lock_again()

    def _is_open(self) -> bool:
        try:
            return self._fd is not None and _identity(self._fd) == self._file
        except OSError:
            return False

    def _lock_again(self) -> None:
        for place, ranges in self._own.items():
            self._own[place] = [each for each in ranges if self._try_lock(*each)]
        for at in self._marks.values():
            self._try_lock(at, at + 1)

    def give_up(self) -> None:
        """Do without the file from now on."""
        self._path, self._fd = "", None

    def is_shared(self) -> bool:
        """Tell whether other processes are counted: there is a file."""
        return self._fd is not None

    def ring(self) -> None:
        """Wake the processes in `wait_for_bell`, and keep them awake until `silence`."""
        if self._fd is not None and not self._rings(0):
            os.write(self._fd, _BELL)

    def silence(self) -> None:
        """End what `ring` has begun."""
        try:
            if self._fd is not None:
                os.read(self._fd, _LONGEST)
        except BlockingIOError:
            pass  # it is silent

    def wait_for_bell(self) -> None:
        """Return while another process rings."""
        self.open()
        self._rings(None)

    def _rings(self, timeout: Optional[float]) -> bool:
        return bool(select.select([self._fd], [], [], timeout)[0])

    @contextmanager
    def turn(self, place: int) -> Iterator[None]:
        """Be the only process that takes memory of the GPU at `place`.

        Raises:
            OSError: the file cannot be opened or locked.
        """
        self.open()
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, place, os.SEEK_SET)
        try:
            yield
        finally:
            self._unlock(place, place + 1)

    def turns(self) -> List[int]:
        """Return the places of the GPUs of which other processes are taking memory."""
        return [place for place, _, _ in self._others(0, 1 << _PRESENCE_BITS)]

    def resize(self, place: int, size: int, capacity: int) -> int:
        """Take as much of `size` bytes as is free, or give back down to it; return the result.

        Only in a `turn` of this process may it take more.
        """
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

    def mark(self, place: int, lane: int) -> None:
        """Show other processes a pool of this one on the GPU at `place`, of the kind `lane`."""
        with self._state:
            base = _lane(place, lane)
            at = base
            while at in self._marks.values() or not self._try_lock(at, at + 1):
                at += 1
                if at == base + (1 << _LANE_BITS):
                    return  # so many that one more makes no difference
            self._marks[base] = at

    def unmark(self, place: int, lane: int) -> None:
        """Remove the mark of a pool."""
        with self._state:
            at = self._marks.pop(_lane(place, lane), None)
            if at is not None:
                self._unlock(at, at + 1)

    def marked(self, place: int, lane: int) -> int:
        """Return how many pools of the kind `lane` other processes show there."""
        base = _lane(place, lane)
        return _size(each[:2] for each in self._others(base, base + (1 << _LANE_BITS)))

    def _gaps(self, start: int, end: int, own: List[Range]) -> List[Range]:
        """Return the parts of a range that no process has locked."""
        found = []
        for low, high in sorted([each[:2] for each in self._others(start, end)] + own):
            found.append((start, low))
            start = max(start, high)
        return [each for each in found + [(start, end)] if each[1] > each[0]]

    def _others(self, start: int, end: int) -> List[Tuple[int, int, int]]:
        """Return the locks of other processes within a range: (start, end, pid)."""
        found, pending = [], [(start, end)]
        while pending and self._fd is not None:
            start, end = pending.pop()
            if start == end:
                continue
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            answer = fcntl.fcntl(self._fd, fcntl.F_GETLK, asked)
            kind, _, at, length, pid = struct.unpack(_FLOCK, answer)
            if kind != fcntl.F_UNLCK:
                low, high = max(start, at), min(end, at + length if length else end)
                found.append((low, high, max(0, pid)))
                pending += [(start, low), (high, end)]
        return found

    def _try_lock(self, start: int, end: int) -> bool:
        if self._fd is None:
            return True
        try:
            flags = fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(self._fd, flags, end - start, start, os.SEEK_SET)
        except (BlockingIOError, PermissionError):  # taken; which of them is up to the system
            return False
        return True

    def _unlock(self, start: int, end: int) -> None:
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, end - start, start, os.SEEK_SET)


def _identity(fd: int) -> Tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _lane(place: int, lane: int) -> int:
    return (place + 1) << _PRESENCE_BITS | lane << _LANE_BITS


def _size(ranges: "Iterator[Range] | List[Range]") -> int:
    return sum(end - start for start, end in ranges)
