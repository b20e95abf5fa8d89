"""Divides the lease between the frameworks and processes of a job, so that the sum stays inside.

A framework takes its pool before it creates it. By default the first takes all, and the next gets
what is left; with a known number of processes each pool is an equal part. Pools that can shrink
while they are used give way: a framework that finds less than an equal part asks their processes to
lower their limits. A process also takes the overhead of its frameworks, which share a CUDA context:
the largest in full, the others by half.
"""

import os
import signal
import sys
import threading
import time
from typing import Callable, Dict, List, Optional, Tuple

from .ledger import Ledger

Lower = Callable[[int], int]
"""Lowers the limit of a pool to a number of bytes, but not below its size; returns the limit.

Called in any thread. Returns UNCHANGED at once if it would have to wait.
"""
UNCHANGED = 1 << 62

WAIT_FOR_MEMORY = 2.0
"""Seconds that other processes have for lowering their limits."""
LOOK_EVERY = 0.02
SMALLEST = 256 * 2**20
"""Bytes of a pool that a framework needs, unless its script asks for less."""


class Pool:
    """What one framework has taken on one GPU; sizes in bytes."""

    def __init__(self, size: int, overhead: int, lower: Optional[Lower]) -> None:
        self.size = size
        self.overhead = overhead
        self.lower = lower


class Place:
    """A GPU of the lease: its place in the ledger, and the bytes that the job has there."""

    def __init__(self, place: int, capacity: int, processes: int) -> None:
        self.place = place
        self.capacity = capacity
        self.part = capacity // processes
        """The largest part that one framework may take, with its overhead."""


class NothingLeft(Exception):
    """Less is left than a framework needs: `left` and `needed` in bytes, and the other holders."""

    def __init__(self, left: int, needed: int, holders: List[Tuple[str, int]]) -> None:
        super().__init__()
        self.left = left
        self.needed = needed
        self.holders = holders


class Shares:
    """What the frameworks of this process have taken of the lease of one job."""

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self._ledger = Ledger(path)
        self._pools: Dict[int, Dict[str, Pool]] = {}
        self._places: Dict[int, Place] = {}
        self._taking = threading.Lock()
        self._state = threading.RLock()
        self._listener: Optional[threading.Thread] = None

    def held(self, place: int, framework: str) -> Optional[int]:
        """Return the size of a framework's pool; None if it has taken none."""
        pool = self._pools.get(place, {}).get(framework)
        return None if pool is None else max(0, pool.size)

    def take(
        self,
        at: Place,
        framework: str,
        sizes: Tuple[int, int],
        overhead: int,
        lower: Optional[Lower] = None,
    ) -> int:
        """Take a pool for `framework`, and return its size; `sizes` are the least and the most.

        A framework that has one keeps it. With `lower` the pool gives way later.

        Raises:
            NothingLeft: less is left than it needs.
        """
        with self._taking:
            held = self.held(at.place, framework)
            if held is not None:
                return min(held, sizes[1])
            try:
                return self._take(at, framework, sizes, overhead, lower)
            except NothingLeft:
                raise
            except Exception as error:  # noqa: BLE001  (the limit matters more)
                self._do_without_ledger(error)
                return self._take(at, framework, sizes, overhead, lower)

    def _do_without_ledger(self, error: Exception) -> None:
        """Count only this process from now on; its frameworks are still limited to the lease."""
        self._ledger.give_up()
        try:
            text = "gpulease: other processes of this job are not counted: %s\n" % error
            sys.stderr.write(text)
            sys.stderr.flush()
        except Exception:  # noqa: BLE001  (there is no stderr)
            return

    def _take(
        self,
        at: Place,
        framework: str,
        sizes: Tuple[int, int],
        overhead: int,
        lower: Optional[Lower],
    ) -> int:
        self._places[at.place] = at
        pools = self._pools.setdefault(at.place, {})
        part = min(sizes[1], at.part - overhead)
        with self._ledger.turn(at.place):
            pool = pools[framework] = Pool(0, overhead, None)
            try:
                self._grow(at, pool, part)
                if pool.size < max(0, min(part, self._equal_part(at.place) - overhead)):
                    self._lower_others(at, pool, part)
                if pool.size < sizes[0]:
                    raise self._refusal(at, framework, sizes[0] + overhead)
            except BaseException:
                del pools[framework]
                self._ledger.resize(at.place, self._total(at.place), at.capacity)
                raise
            pool.lower = lower
        # After its turn, so that holders do not count it as a pool and as a newcomer (_run).
        self._ledger.mark(at.place, 1 if lower else 0)
        if lower:
            self._listen()
        return pool.size

    def resize(self, place: int, framework: str, wanted: int) -> int:
        """Change the size of a pool to `wanted` bytes or what is free; return it."""
        at, pool = self._places[place], self._pools[place][framework]
        wanted = min(wanted, at.part - pool.overhead)
        with self._taking:
            try:
                with self._ledger.turn(place):
                    self._grow(at, pool, wanted)
            except Exception as error:  # noqa: BLE001  (as above)
                self._do_without_ledger(error)
                self._grow(at, pool, wanted)
        return max(0, pool.size)

    def release(self, framework: str) -> None:
        """Give back what a framework has taken."""
        with self._taking, self._state:
            try:
                self._release(framework)
            except OSError as error:
                self._do_without_ledger(error)
                self._release(framework)

    def _release(self, framework: str) -> None:
        for place, pools in self._pools.items():
            if pools.pop(framework, None) is not None:
                self._ledger.resize(place, self._total(place), self._places[place].capacity)
                self._mark(place)

    def _mark(self, place: int) -> None:
        """Remove the marks of pools that are gone."""
        kinds = {bool(pool.lower) for pool in self._pools[place].values()}
        for kind in (False, True):
            if kind not in kinds:
                self._ledger.unmark(place, int(kind))

    def _grow(self, at: Place, pool: Pool, size: int) -> None:
        """Give a pool `size` bytes, or what is free; below 0 if that is less than its overhead."""
        with self._state:
            pool.size = max(0, size)
            total = self._total(at.place)
            got = self._ledger.resize(at.place, total, at.capacity)
            pool.size -= total - got

    def _total(self, place: int) -> int:
        pools = list(self._pools.get(place, {}).values())
        overheads = [pool.overhead for pool in pools]
        largest = max(overheads or [0])
        return sum(pool.size for pool in pools) + largest + (sum(overheads) - largest) // 2

    def _equal_part(self, place: int, newcomers: int = 0) -> int:
        """Return the bytes of one pool, with its overhead, if all on the GPU were equal."""
        others = sum(self._ledger.marked(place, kind) for kind in (0, 1))
        pools = len(self._pools[place]) + others + newcomers
        return self._places[place].capacity // max(1, pools)

    def _lower_others(self, at: Place, pool: Pool, part: int) -> None:
        """Let other pools give way until `pool` has an equal part; wait for other processes."""
        equal = self._equal_part(at.place)
        part = max(0, min(part, equal - pool.overhead))
        self._give_way(at, equal)
        self._grow(at, pool, part)
        deadline = time.monotonic() + WAIT_FOR_MEMORY
        while pool.size < part and self._ledger.marked(at.place, 1):
            if time.monotonic() > deadline:
                break
            self._ledger.wake()
            time.sleep(LOOK_EVERY)
            self._grow(at, pool, part)
        self._ledger.end_wakeup()

    def _give_way(self, at: Place, equal: int) -> None:
        """Lower the limits of this process's pools to an equal part, as far as they can."""
        with self._state:
            for pool in self._pools[at.place].values():
                if pool.lower and pool.size + pool.overhead > equal:
                    pool.size = min(pool.size, pool.lower(max(0, equal - pool.overhead)))
            self._ledger.resize(at.place, self._total(at.place), at.capacity)

    def _refusal(self, at: Place, framework: str, needed: int) -> NothingLeft:
        own = [
            (name, pool.size + pool.overhead)
            for name, pool in self._pools[at.place].items()
            if name != framework
        ]
        others = [
            (_name_of(taken.pid), taken.size)
            for taken in self._ledger.holders(at.place, at.capacity)
        ]
        left = at.capacity - sum(size for _, size in own + others)
        return NothingLeft(max(0, left), needed, own + others)

    def _listen(self) -> None:
        """Give way to other processes from now on."""
        if self._listener is None and self._ledger.is_shared():
            self._listener = threading.Thread(target=self._run, name="gpulease-share", daemon=True)
            self._listener.start()

    def _run(self) -> None:
        try:
            signals = getattr(signal, "valid_signals", lambda: range(1, signal.NSIG))
            signal.pthread_sigmask(signal.SIG_BLOCK, signals())
            while self._ledger.is_shared():
                self._ledger.wait_for_wakeup()
                parts = {place: self._equal_part(place, 1) for place in list(self._places)}
                turns = self._ledger.turns()
                for place in turns:
                    if place in parts:
                        self._give_way(self._places[place], parts[place])
                time.sleep(LOOK_EVERY)
                if not turns and not self._ledger.turns() and not self._taking.locked():
                    self._ledger.end_wakeup()  # a process was killed before it did this
        except Exception:  # noqa: BLE001  (the script must not notice the thread)
            return


def _name_of(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return "process %d" % pid if pid else "another process"
    return "process %d (%s)" % (pid, " ".join(words).strip()[:60])


_all: Dict[Tuple[str, str], Shares] = {}


def of(job: str, path: str) -> Shares:
    """Return what this process has taken of the lease of `job`; a forked child has nothing."""
    found = _all.get((job, path))
    if found is None or found.pid != os.getpid():
        found = _all[job, path] = Shares(path)
    return found
