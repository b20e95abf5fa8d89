"""How busy simulated GPUs are: the CPU time of each process on them, in percent of one CPU.

It stands in for the percentage of time in which a kernel ran.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpulease.domain.memory import GpuUuid

_TICKS = os.sysconf("SC_CLK_TCK")
_SHORTEST_S = 0.05
"""Of what is shorter, the kernel's ticks say nothing."""


class BusyTime:
    """Measures from one reading to the next."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._read_at_s: float | None = None
        self._ticks: dict[tuple[int, int], int] = {}
        self._last: Mapping[GpuUuid, Mapping[int, int]] = {}

    def read(
        self, held: Mapping[GpuUuid, Mapping[int, int]]
    ) -> Mapping[GpuUuid, Mapping[int, int]]:
        """Return the percentage of each process by GPU since the reading before; first nothing.

        `held` has the processes on each GPU, by pid.
        """
        at_s, before = self._now_s(), self._read_at_s
        if before is not None and at_s - before < _SHORTEST_S:
            return self._last
        times = {pid: _ticks_of(pid) for pids in held.values() for pid in pids}
        spent = {
            pid: ticks - self._ticks.get((pid, started), 0)
            for pid, (started, ticks) in times.items()
        }
        self._ticks = {(pid, started): ticks for pid, (started, ticks) in times.items()}
        self._read_at_s = at_s
        if before is None:
            return {}
        room = (at_s - before) * _TICKS
        self._last = {
            gpu: {pid: int(100 * spent[pid] / room) for pid in pids} for gpu, pids in held.items()
        }
        return self._last


def _ticks_of(pid: int) -> tuple[int, int]:
    """Return when a process started and the CPU time it has had, both in ticks; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # See proc_pid_stat(5): the fields 14, 15 and 22, of which two stand before the bracket.
        return int(fields[19]), int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0, 0
