"""Whether this process counts pids as the machine does, or stands in a pid namespace of its own."""

from pathlib import Path

_FIRST = 0xEFFFFFFC
"""The inode of the first pid namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h), since 3.8."""


def has_first_pids(link: Path = Path("/proc/self/ns/pid")) -> bool:
    """Tell whether this is the first pid namespace, that of the machine; also if nobody says."""
    try:
        return link.stat().st_ino == _FIRST
    except OSError:
        return True
