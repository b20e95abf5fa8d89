"""CPU time and memory of an idle daemon."""

import time
from collections.abc import Iterator

from benchmarks.daemon import running
from benchmarks.figures import Figure

SETTLES_S = 5
IDLE_S = 60
MOST_MIB = 64
MOST_S = 0.10


def run() -> Iterator[Figure]:
    """Measure an idle minute with eight GPUs that are sampled every second, and the memory."""
    with running() as daemon:
        time.sleep(SETTLES_S)
        begun = daemon.cpu_s()
        time.sleep(IDLE_S)
        used = daemon.cpu_s() - begun
        yield Figure("CPU of an idle minute, 8 GPUs, all processes", used, "s", MOST_S)
        yield Figure("memory at rest (PSS), all processes", daemon.pss_mib(), "MiB", MOST_MIB)
