"""The machine that the figures are from."""

import os
import platform
import statistics
import tempfile
from pathlib import Path

from benchmarks.timing import seconds

_TIMES = 50
_BLOCK = os.urandom(4096)


def machine() -> dict[str, str]:
    """Return what a reader needs to compare figures with those of another machine."""
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "fdatasync": f"{fdatasync_s() * 1e3:.2f} ms in {tempfile.gettempdir()}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def fdatasync_s() -> float:
    """Return the median seconds of storing a block on the disk that the benchmarks use."""
    with tempfile.TemporaryFile(buffering=0) as file:

        def store() -> None:
            file.write(_BLOCK)
            os.fdatasync(file.fileno())

        return statistics.median(seconds(store) for _ in range(_TIMES))
