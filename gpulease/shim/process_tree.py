"""The tree of processes below one: find all of them, and signal them while they fork.

Processes are read from /proc/PID/stat. A signal cannot reach a later process with the same pid.
Shim and daemon share this module. `MainProcess` is the shim's: signals go to it and the process
group that it leads as a terminal and a shell would send them. It keeps its pid until the shim has
reaped it, which happens here too, together with all orphans of the worker.
"""

from __future__ import annotations

import os

from gpulease.record import record, replace
from gpulease.wire.frames import BadFrame

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator
else:
    import _signal as signal  # plain numbers, without enumerations

_ENDED = (b"Z", b"X")
_PASSES = 20
_PIECE = 1 << 14


@record(frozen=True)
class Entry:
    """A process. `started`, in clock ticks since boot, tells apart processes with the same pid."""

    pid: int
    parent: int
    group: int
    started: int
    zombie: bool
    """It has ended and is not reaped. A process whose main thread alone has ended still runs."""
    session: int


def entry(pid: int) -> Entry | None:
    """Return the process with this pid, or None if there is none or it is not visible.

    Raises:
        OSError: the lookup failed, for example because no descriptor is free. The process may
            exist.
    """
    found = entry_and_program(pid)
    return None if found is None else found[0]


def entry_and_program(pid: int) -> tuple[Entry, bytes] | None:
    """Return the process with this pid, and a value that changes with each exec.

    The value is its start with addresses that the kernel randomises, and the same for no other
    process. It is empty for one without memory, which has ended or is about to execute. Raises as
    `entry`.
    """
    if (fields := _fields(pid)) is None:
        return None
    state, parent, group = fields[0], int(fields[1]), int(fields[2])
    # This is the state of the main thread, which may end before the others (pthread_exit(3)).
    zombie = state in _ENDED and (int(fields[17]) <= 1 or other_thread(pid) is None)
    started, addresses = fields[19], fields[23:26]  # startcode, endcode, startstack
    program = b"" if addresses[0] == b"0" else b" ".join((started, *addresses))
    return Entry(pid, parent, group, int(started), zombie, int(fields[3])), program


def program_of(pid: int) -> bytes:
    """Return the value that `entry_and_program` has for a process; empty if it has ended."""
    found = entry_and_program(pid)
    return b"" if found is None else found[1]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, and not by a debugger."""
    fields = _fields(pid)
    return fields is not None and fields[0] == b"T"


def processes() -> Iterator[Entry]:
    """Yield every visible process, each read when it is yielded."""
    with os.scandir("/proc") as names:
        for name in names:
            if name.name.isdigit() and (found := entry(int(name.name))) is not None:
                yield found


def other_thread(pid: int) -> int | None:
    """Return a living thread of a process whose main thread has ended; None for other processes.

    A killed thread remains, dead, until its debugger reaps it.
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
    """Send signals to exactly this process; False if it has ended or may not be signalled.

    A pid may be reused between a look at the process and the signal, but its descriptor always
    means the same process (pidfd_open(2)).
    """
    try:
        pidfd = os.pidfd_open(target.pid)
    except OSError:
        return False
    try:
        now = entry(target.pid)
        if now is None or now.zombie or now.started != target.started:
            return False
        for number in numbers:
            signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def _fields(pid: int, name: str = "stat") -> list[bytes] | None:
    """Return the fields after the name in /proc/PID/stat, see proc_pid_stat(5)."""
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


def read_proc(path: str) -> bytes:
    """Return a small file of the kernel; empty if it cannot be read, or its process has ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        content = piece = os.read(fd, _PIECE)
        # The kernel writes all that fits: a piece that is not full is the last.
        while len(piece) == _PIECE:
            piece = os.read(fd, _PIECE)
            content += piece
        return content
    except OSError:
        return b""
    finally:
        os.close(fd)


def descendants(root: int) -> list[Entry]:
    """Return the living processes below `root`, parents before their children."""
    children: dict[int, list[Entry]] = {}
    for found in processes():
        children.setdefault(found.parent, []).append(found)
    below = list(children.get(root, ()))
    for found in below:
        below += children.get(found.pid, ())
    return [found for found in below if not found.zombie]


def terminate(root: int) -> bool:
    """Send SIGTERM to every process below `root`, and SIGCONT in case it is stopped.

    Return whether it reached any.
    """
    reached = [deliver(each, signal.SIGTERM, signal.SIGCONT) for each in descendants(root)]
    return any(reached)


def hang_up_the_stopped(root: int) -> None:
    """Send SIGHUP and SIGCONT to every stopped process below `root`.

    The kernel does this for orphaned process groups, which nobody can continue, see setpgid(2).
    Processes of a job whose main process has ended are in that situation, but the kernel does not
    see it, because their shim still lives.
    """
    for found in descendants(root):
        if is_stopped(found.pid):
            deliver(found, signal.SIGHUP, signal.SIGCONT)


_PODMAN = (b"podman\n", b"conmon\n", b"catatonit\n", b"podman pause\n")
"""The names of podman's own processes around a container."""


def kill(root: int, *, spare_podman: bool = False) -> None:
    """Kill every process below `root`, and those that they fork meanwhile.

    With `spare_podman`, podman's own processes are left to end by themselves, as they do once the
    container is dead. If they are killed with it, podman takes the container for a running one.

    Look again while there are new processes. A tree that forks faster than that is left to the next
    call; callers repeat it until nothing is left.
    """
    killed: set[tuple[int, int]] = set()
    for _ in range(_PASSES):
        new = [
            found
            for found in descendants(root)
            if (found.pid, found.started) not in killed
            and not (spare_podman and read_proc(f"/proc/{found.pid}/comm") in _PODMAN)
        ]
        if not new:
            return
        for found in new:
            deliver(found, signal.SIGKILL)
            killed.add((found.pid, found.started))


def end_pause_processes(root: int) -> None:
    """Kill podman's pause processes below `root` if nothing else is left there.

    The first rootless podman of a user leaves one behind, which keeps the user's namespaces for
    later containers and never ends. The next podman starts another, or joins a container's.
    """
    left = descendants(root)
    if all(_is_pause(found.pid) for found in left):
        for found in left:
            deliver(found, signal.SIGKILL)


def _is_pause(pid: int) -> bool:
    # Without catatonit, podman waits itself, by another name: pkg/rootless/rootless_linux.c.
    if read_proc(f"/proc/{pid}/comm") == b"podman pause\n":
        return True
    return read_proc(f"/proc/{pid}/cmdline") == b"catatonit\0-P\0"


def has_group(root: int, group: int) -> bool:
    """Return whether a living process below `root` is in this process group."""
    return any(found.group == group for found in descendants(root))


TO_THE_GROUP = frozenset(
    {
        *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
        *(signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGKILL),
    }
)
"""Signals that a terminal, timeout(1) and the end of a pipeline send to every process of a command.
Any other signal is for the main process alone."""
_STOPPED_BY_A_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@record(frozen=True)
class ChildChanges:
    """What has happened to the children of this shim since they were last reaped."""

    exit_code: int | None = None
    """The main process has ended, with this code or, below 0, by this signal."""
    stopped_by: int | None = None
    """The main process was stopped by this signal."""
    orphan_stopped: bool = False
    """Another child was stopped as a terminal does it."""
    none_left: bool = False


class MainProcess:
    """The child of this shim that became the command."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stopped_by: int | None = None
        """The signal that stopped it, while it is stopped."""
        self._is_reaped = False

    def reap(self) -> ChildChanges:
        """Reap every child that has ended, and note those that were stopped or continued."""
        changes = ChildChanges()
        try:
            while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0] != 0:
                pid, status = found
                if pid == self.pid:
                    changes = self._note(changes, status)
                elif os.WIFSTOPPED(status) and os.WSTOPSIG(status) in _STOPPED_BY_A_TERMINAL:
                    changes = replace(changes, orphan_stopped=True)
        except ChildProcessError:
            changes = replace(changes, none_left=True)
        return changes

    def send(self, number: int) -> None:
        """Send a signal to it, or to its group where a terminal would; never to a reused pid.

        Raises:
            BadFrame: no such signal exists.
        """
        if number not in signal.valid_signals():
            raise BadFrame(f"no signal {number}")
        if number not in TO_THE_GROUP:
            self.send_alone(number)
        elif not self._is_reaped or has_group(os.getpid(), self.pid):
            _kill(-self.pid, number)

    def send_alone(self, number: int) -> None:
        """Send a signal to this one process if it still exists."""
        if not self._is_reaped:
            _kill(self.pid, number)

    def _note(self, changes: ChildChanges, status: int) -> ChildChanges:
        if os.WIFSTOPPED(status):
            self.stopped_by = os.WSTOPSIG(status)
            return replace(changes, stopped_by=self.stopped_by)
        self.stopped_by = None
        if os.WIFCONTINUED(status):
            return replace(changes, stopped_by=None)
        self._is_reaped = True
        return replace(changes, stopped_by=None, exit_code=os.waitstatus_to_exitcode(status))


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has ended, or has become another user
