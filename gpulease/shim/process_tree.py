"""All processes below one: finding them, and signalling them while they fork.

One process as /proc/PID/stat shows it, and a signal that cannot hit its successor.
"""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_ENDED = (b"Z", b"X")


class Entry(NamedTuple):
    """A process; `started` (clock ticks since boot) tells it from a later one of the same pid."""

    pid: int
    parent: int
    group: int
    started: int
    zombie: bool
    """It has ended and waits to be seen to. One whose main thread alone has ended lives on."""
    session: int


def entry(pid: int) -> Entry | None:
    """Return the process with this pid, or None if there is none that we may see.

    Raises:
        OSError: it could not be looked up, as for want of descriptors; that is not being gone.
    """
    if (fields := _fields(pid)) is None:
        return None
    state, parent, group = fields[0], int(fields[1]), int(fields[2])
    # The state is that of the main thread, which may end before the others do (pthread_exit(3)).
    zombie = state in _ENDED and (int(fields[17]) <= 1 or other_thread(pid) is None)
    return Entry(pid, parent, group, int(fields[19]), zombie, int(fields[3]))


def is_stopped(target: Entry) -> bool:
    """Tell whether exactly this process is stopped by a signal, which no debugger watches."""
    fields = _fields(target.pid)
    return fields is not None and fields[0] == b"T" and int(fields[19]) == target.started


def processes() -> Iterator[Entry]:
    """Yield every process that we may see, each as it is when its turn comes."""
    with os.scandir("/proc") as names:
        for name in names:
            if name.name.isdigit() and (found := entry(int(name.name))) is not None:
                yield found


def other_thread(pid: int) -> int | None:
    """Return a living thread of a process whose main thread has ended, None for any other process.

    A thread that was killed is still there, dead, for as long as a debugger does not see to it.
    """
    fields = _fields(pid)
    if fields is None or fields[0] not in _ENDED:
        return None
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  shims load no pathlib
    except OSError:
        return None
    states = ((each, _fields(pid, f"task/{each}/stat")) for each in threads)
    return next((int(each) for each, of in states if of and of[0] not in _ENDED), None)


def deliver(target: Entry, *numbers: int) -> bool:
    """Send signals to exactly this process; False if it has gone or is not ours to signal.

    A pid may be given to someone else between the look and the signal; a descriptor of the
    process cannot (pidfd_open(2)).
    """
    try:
        pidfd = os.pidfd_open(target.pid)
    except OSError:
        return False
    try:
        now = entry(target.pid)
        if now is None or now.started != target.started:
            return False
        for number in numbers:
            signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def _fields(pid: int, name: str = "stat") -> list[bytes] | None:
    """Return what follows the name in /proc/PID/stat, see proc_pid_stat(5)."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        return os.read(fd, 4096).rpartition(b")")[2].split()
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


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
