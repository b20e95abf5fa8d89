"""The processes of a job, for `gpulease top`: read from /proc, and drawn as a tree.

The daemon says which processes are a job's and what they use of GPUs. Users, commands and
environments are read here, by the user who looks: the kernel decides who may see them.
"""

import os
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from threading import Thread

from gpulease.cli.top.lines import Column, Line, row, widths
from gpulease.drawing.words import UNKNOWN, amount, clean, figure, index_of
from gpulease.errors import GpuleaseError
from gpulease.peer_credentials import user_name
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import ProcessView, StatusView
from gpulease.wire.text import shown_command

_RESTS_FOR = 200
"""Times the CPU time of a reading that pass before the next: jobs may have many processes."""
_LONGEST_COMMAND = 4096
_LARGEST_ENVIRONMENT = 8 << 20
_PIECE = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


_user_name = cache(user_name)
"""A directory of users (LDAP) may be slow."""


@dataclass(frozen=True)
class Process:
    """What /proc has of a process, see proc_pid_stat(5)."""

    pid: int
    parent: int
    started: int
    """Clock ticks since boot. A later process with the same pid has another one."""
    user: str
    command: str
    cpu_s: float
    ram: int
    """Bytes that are resident, with those that it shares."""


def read_process(pid: int) -> Process | None:
    """Return a process; None if it has ended, or the kernel hides it from this user."""
    try:
        name, _, rest = _read(pid, "stat", 4096).partition(b"(")[2].rpartition(b")")
        uid = _read(pid, "status", 4096).partition(b"\nUid:")[2].split(maxsplit=2)[1]
        words = _read(pid, "cmdline", _LONGEST_COMMAND).rstrip(b"\0").split(b"\0")
        fields = rest.split()
        # Many servers, and TensorFlow's workers, overwrite their arguments with one text.
        command = shlex.join(map(os.fsdecode, words)) if len(words) > 1 else os.fsdecode(words[0])
        return Process(
            pid,
            parent=int(fields[1]),
            started=int(fields[19]),
            user=_user_name(int(uid)),
            command=shown_command(command or f"[{os.fsdecode(name)}]"),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
            ram=int(fields[21]) * _PAGE,
        )
    except (OSError, ValueError, IndexError):
        return None


def read_environment(process: Process) -> list[str]:
    """Return the variables that a process was started with, sorted.

    Raises:
        GpuleaseError: it has ended, or the kernel does not show them to this user.
    """
    what = f"cannot read the environment of process {process.pid}"
    try:
        content = _read(process.pid, "environ", _LARGEST_ENVIRONMENT)
    except PermissionError:
        raise GpuleaseError(
            f"{what}: it belongs to {clean(process.user)}",
            "the kernel shows it to that user and to root",
        ) from None
    except OSError:
        content = b""
    # If the process is still there, nothing of a later one with the same pid was read.
    now = read_process(process.pid)
    if now is None or now.started != process.started:
        raise GpuleaseError(f"{what}: it has ended")
    return sorted(clean(os.fsdecode(each)) for each in content.split(b"\0") if each)


def _read(pid: int, name: str, most: int) -> bytes:
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = piece = os.read(descriptor, min(most, _PIECE))
        # The kernel writes all that fits: a piece that is not full is the last.
        while len(piece) == _PIECE and len(content) < most:
            piece = os.read(descriptor, _PIECE)
            content += piece
        return content[:most]
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Reading:
    """The processes of a job as read at one time."""

    at: float = 0.0
    """Seconds on the monotonic clock."""
    processes: Mapping[int, Process] = field(default_factory=dict)
    """By pid."""
    busy: Mapping[int, float] = field(default_factory=dict)
    """Percent of a core since the last reading, by pid; of those that were there then."""


def read_all(pids: Iterable[int], before: Reading) -> Reading:
    """Read processes."""
    at = time.monotonic()
    found = {pid: each for pid in pids if (each := read_process(pid)) is not None}
    busy = {
        pid: 100 * (each.cpu_s - earlier.cpu_s) / (at - before.at)
        for pid, each in found.items()
        if (earlier := before.processes.get(pid)) and earlier.started == each.started
    }
    return Reading(at, found, busy)


Environment = tuple[Process, list[str]]
Result = Reading | Environment | GpuleaseError


class ProcessReader:
    """Reads in a thread: a process can block those who read its command, and blocks no key here."""

    def __init__(self, then: Callable[[Result], object]) -> None:
        self._then = then
        self._asked: SimpleQueue[Collection[int] | Process | None] = SimpleQueue()
        Thread(target=self._run, name="processes", daemon=True).start()

    def read(self, what: Collection[int] | Process) -> None:
        """Read the processes with these pids, unless that was done lately, or an environment."""
        if isinstance(what, Process) or self._asked.empty():
            self._asked.put(what)

    def stop(self) -> None:
        """End after what is read now."""
        self._asked.put(None)

    def _run(self) -> None:
        last, due = Reading(), 0.0
        while (asked := self._asked.get()) is not None:
            if isinstance(asked, Process):
                try:
                    self._then((asked, read_environment(asked)))
                except GpuleaseError as error:
                    self._then(error)
            elif time.monotonic() >= due:
                begun = time.thread_time()
                last = read_all(asked, last)
                due = last.at + _RESTS_FOR * (time.thread_time() - begun)
                self._then(last)


@dataclass
class Use:
    """What a process uses of GPUs."""

    view: ProcessView
    gpus: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)


def uses_of(job: JobView, status: StatusView) -> dict[int, Use]:
    """Return what each process of a job uses of GPUs, by pid."""
    found: dict[int, Use] = {}
    for gpu in status.gpus:
        # A GPU that MIG divides lists the processes of its MIG devices once more.
        for each in gpu.processes if gpu.state != "divided" else ():
            if each.job == job.id:
                use = found.setdefault(each.pid, Use(each))
                use.gpus.append(index_of(gpu))
                use.memory += [] if each.memory is None else [each.memory]
                use.busy += [] if each.utilization is None else [each.utilization]
    return found


def tree(pids: Iterable[int], processes: Mapping[int, Process]) -> list[tuple[int, int]]:
    """Return each pid with its depth, children below their parents."""
    left = set(pids)
    children: dict[int, list[int]] = {}
    roots: list[int] = []
    for pid in sorted(left, reverse=True):
        parent = processes[pid].parent if pid in processes else 0
        (children.setdefault(parent, []) if parent in left else roots).append(pid)
    placed: list[tuple[int, int]] = []
    # Read one after the other, processes with reused pids may seem to be their own ancestors.
    roots = [*sorted(left, reverse=True), *roots]
    while roots:
        stack = [(roots.pop(), 0)]
        while stack:
            pid, depth = stack.pop()
            if pid in left:
                left.remove(pid)
                placed.append((pid, depth))
                stack += [(child, depth + 1) for child in children.get(pid, ())]
    return placed


_COLUMNS = (
    Column("PID", 7, right=True),
    Column("user", 8, leaves=2),
    Column("gpu", 4, right=True, leaves=3),
    Column("uses", 6, right=True),
    Column("util", 4, right=True, leaves=1),
    Column("cpu", 5, right=True, leaves=4),
    Column("ram", 6, right=True, leaves=5),
    Column("command", 16, grows=1),
)


class ProcessTable:
    """Draws the rows of processes in a width."""

    def __init__(self, reading: Reading, uses: Mapping[int, Use], width: int) -> None:
        self._reading = reading
        self._uses = uses
        self._widths = widths(_COLUMNS, width)

    def heading(self) -> Line:
        """Return the titles of the columns."""
        return row(_COLUMNS, [(each.title, "heading") for each in _COLUMNS], self._widths)

    def line(self, pid: int, depth: int) -> Line:
        """Return the row of a process."""
        process, use = self._reading.processes.get(pid), self._uses.get(pid)
        seen = use.view if use else None
        # What the kernel hides from this user, or is on another machine, the daemon may tell.
        user = process.user if process else (seen and seen.user)
        told = (seen and (seen.command or seen.name)) or UNKNOWN
        command = process.command if process else shown_command(told)
        # A deep tree leaves room for commands.
        branch = "  " * min(depth - 1, self._widths[-1] // 6) + r"\_ " if depth else ""
        cells = [
            (str(pid), ""),
            (clean(user or UNKNOWN), ""),
            (",".join(use.gpus) if use else "", ""),
            (amount(sum(use.memory) if use.memory else None) if use else "", ""),
            (figure(sum(use.busy) / len(use.busy), "%") if use and use.busy else "", ""),
            (figure(busy, "%") if (busy := self._reading.busy.get(pid)) is not None else "", ""),
            (amount(process.ram) if process else "", "dim"),
            (branch + command, ""),
        ]
        return row(_COLUMNS, cells, self._widths)
