"""What a process and all that it started take: CPU time and memory.

A control group counts all of them, also those that have ended or lost their parent. Where none can
be made, the processes below one process are counted instead, without those that have ended.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_ROOTS = tuple(Path("/sys/fs/cgroup", name) for name in ("cpuacct", "cpu,cpuacct", "unified", ""))
"""Version 1 has a hierarchy for CPU time; version 2 has one hierarchy, alone or beside it."""


class ProcessGroup:
    """The processes that begin in one control group, or below one process."""

    def __init__(self, root: int, folder: Path | None) -> None:
        self._root = root
        self._folder = folder

    def pids(self) -> list[int]:
        """Return the processes that live."""
        if self._folder is None:
            return _below(self._root)
        return [int(each) for each in (self._folder / "cgroup.procs").read_text().split()]

    def cpu_s(self) -> float:
        """Return the seconds of CPU time since the group was made."""
        if self._folder is None:
            return sum(_cpu_s(pid) for pid in self.pids())
        with contextlib.suppress(OSError):
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        return int((self._folder / "cpu.stat").read_text().split()[1]) / 1e6

    def pss_mib(self) -> float:
        """Return the memory, with each shared page divided among the processes that share it."""
        return sum(map(pss_mib, self.pids()))


@contextlib.contextmanager
def control_group(name: str) -> Iterator[Path | None]:
    """Make a control group that counts CPU time; None where none can be made."""
    folder = next((made for root in _ROOTS if (made := _made(root / name)) is not None), None)
    try:
        yield folder
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _made(folder: Path) -> Path | None:
    with contextlib.suppress(OSError):
        folder.mkdir()
        if (folder / "cpuacct.usage").exists() or (folder / "cpu.stat").exists():
            return folder
        folder.rmdir()
    return None


def add(pid: int, folder: Path | None) -> None:
    """Put a process into a control group, before it has started others."""
    if folder is not None:
        (folder / "cgroup.procs").write_text(str(pid))


def _below(root: int) -> list[int]:
    """Return `root` and its descendants."""
    children: dict[int, list[int]] = {}
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
    for pid in pids:
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _cpu_s(pid: int) -> float:
    # proc_pid_stat(5): the process's own time, and that of children that it has waited for.
    return sum(map(int, _stat(pid)[11:15])) / _TICKS


def _stat(pid: int) -> list[str]:
    """Return the fields after the name, which is in parentheses; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def pss_mib(pid: int) -> float:
    """Return the memory of a process, of which shared pages are divided."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
