"""The CPU and RAM of this machine, for the head of `gpulease top`; see proc_stat(5)."""

from pathlib import Path

from gpulease.drawing.words import size

_IDLE = slice(3, 5)
"""The columns idle and iowait, after the name."""
_TIMES = 8
"""Columns that add up to all time: guest time is part of user time."""


class Host:
    """Reads how busy the machine is, from one look to the next."""

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def see(self) -> str:
        """Return the use of CPU since the last look and of RAM now; what is unknown is left out."""
        return " · ".join(part for part in (self._cpu(), _ram()) if part)

    def _cpu(self) -> str:
        try:
            first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
            times = [int(each) for each in first.split()[1 : _TIMES + 1]]
        except (OSError, ValueError):
            return ""
        before, self._before = self._before, (sum(times[_IDLE]), sum(times))
        if before is None or (total := self._before[1] - before[1]) <= 0:
            return ""
        idle = self._before[0] - before[0]
        return f"CPU {100 * (total - idle) / total:.0f}%"


def _ram() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (each.partition(":") for each in lines)
        }
        total, available = known["MemTotal"], known["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return ""
    return f"RAM {size(total - available)} of {size(total)}"
