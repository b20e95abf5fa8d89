"""Holds a job to its lease of RAM where no cgroup does: as the kernel would, but after a grace.

Once a second the resident memory of its processes is added up. What several of them share counts
once: that is asked for only when the plain sum is too large, since the kernel takes milliseconds
for it. A job that stays above its lease loses its largest process.
"""

from __future__ import annotations

import os

from gpulease.shim import process_tree
from gpulease.shim.process_tree import read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

    from gpulease.event_loop import EventLoop
    from gpulease.shim.process_tree import Entry
else:
    import _signal as signal  # plain numbers, without enumerations

_EVERY_S = 1.0
_TIMER = "ram"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


class RamWatch:
    """Looks at the RAM of one job, below this shim."""

    def __init__(
        self,
        loop: EventLoop,
        limit: int,
        grace_s: float | None,
        notify: Callable[[str], None],
        every_s: float = _EVERY_S,
    ) -> None:
        """`limit` is in bytes. After `grace_s` above it a process is killed; None: only notices."""
        self.limit = limit
        self.peak = 0
        """The most bytes that were seen."""
        self.kills = 0
        self._loop = loop
        self._grace_s = grace_s
        self._notify = notify
        self._every_s = every_s
        self._over_since: float | None = None

    def begin(self) -> None:
        """Look from now on."""
        self._loop.set_timer_after(_TIMER, self._every_s, self._look)

    def cancel(self) -> None:
        """Stop looking."""
        self._loop.cancel_timer(_TIMER)

    def _look(self) -> None:
        self.begin()
        sizes = [(_resident(each.pid), each) for each in process_tree.descendants(os.getpid())]
        if _sum(sizes) > self.limit:
            sizes = [(_proportional(each.pid), each) for _, each in sizes]
        used, now = _sum(sizes), self._loop.now()
        self.peak = max(self.peak, used)
        if used <= self.limit:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = now
            self._notify(self._warning(used))
        elif self._grace_s is not None and now >= self._over_since + self._grace_s:
            self._kill(max(sizes, key=_size)[1])

    def _warning(self, used: int) -> str:
        what = f"the job uses {used // _MIB}M of RAM, and leases {self.limit // _MIB}M"
        if self._grace_s is None:
            return f"{what}; ask for more with --ram"
        return (
            f"{what}; its largest process is killed in {self._grace_s:g}s unless it frees the rest"
        )

    def _kill(self, largest: Entry) -> None:
        self._over_since = None
        if process_tree.deliver(largest, signal.SIGKILL):
            self.kills += 1
            self._notify(f"process {largest.pid} is killed: the job used more RAM than its lease")


def _size(each: tuple[int, Entry]) -> int:
    return each[0]


def _sum(sizes: Sequence[tuple[int, Entry]]) -> int:
    return sum(map(_size, sizes))


def _resident(pid: int) -> int:
    fields = read_proc(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    """Return the resident bytes of a process, each page divided by the processes that have it."""
    for line in read_proc(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)  # of another user, or ended
