"""All processes below one: finding them, and signalling them while they fork."""

import signal
from collections import defaultdict

from gpulease.process.proc import Entry, deliver, is_stopped, processes

_PASSES = 20


def descendants(root: int) -> list[Entry]:
    """Return the living processes below `root`, parents before their children."""
    children: dict[int, list[Entry]] = defaultdict(list)
    for found in processes():
        children[found.parent].append(found)
    below = list(children[root])
    for found in below:
        below += children[found.pid]
    return [found for found in below if not found.zombie]


def terminate(root: int) -> None:
    """Ask every process below `root` to go: SIGTERM, and SIGCONT for those that are stopped."""
    for found in descendants(root):
        deliver(found, signal.SIGTERM, signal.SIGCONT)


def hang_up_the_stopped(root: int) -> None:
    """Send SIGHUP and SIGCONT to every process below `root` that is stopped.

    The kernel does so where nobody is left who could continue them (orphaned process groups, see
    setpgid(2)). Below a shim that is so once the main process has gone, which it cannot know.
    """
    for found in descendants(root):
        if is_stopped(found):
            deliver(found, signal.SIGHUP, signal.SIGCONT)


def kill(root: int) -> None:
    """Kill every process below `root`, and those that they forked meanwhile.

    Looks again as long as a look finds someone new; a tree that forks faster than that is met
    again when the caller comes back, which it does until nothing is left.
    """
    met: set[tuple[int, int]] = set()
    for _ in range(_PASSES):
        new = [found for found in descendants(root) if (found.pid, found.started) not in met]
        if not new:
            return
        for found in new:
            deliver(found, signal.SIGKILL)
            met.add((found.pid, found.started))


def has_group(root: int, group: int) -> bool:
    """Tell whether a living process below `root` is in this process group."""
    return any(found.group == group for found in descendants(root))
