"""Which pids in the driver's lists have been given to somebody else since they came there.

What a GPU holds for a process that has died may stay, with its pid, for as long as a child that it
forked keeps its files open. The kernel gives that number away again, and whoever gets it holds
nothing of that memory.
"""

from collections.abc import Iterable

from gpulease.process.proc import entry


class Listing:
    """Remembers, from one look at the GPUs to the next, who had each pid at first."""

    def __init__(self) -> None:
        self._first: dict[int, int | None] = {}
        """When each process started, in clock ticks since boot; None if there was none then."""

    def inherited(self, pids: Iterable[int]) -> frozenset[int]:
        """Take in what is listed now; return the pids that are not who they were at first.

        A pid that was not listed at the look before is a new one.
        """
        here: dict[int, int | None] = {}
        for pid in set(pids):
            found = entry(pid)
            here[pid] = None if found is None else found.started
        self._first = {pid: self._first.get(pid, started) for pid, started in here.items()}
        return frozenset(
            pid
            for pid, started in here.items()
            if started is not None and started != self._first[pid]
        )
