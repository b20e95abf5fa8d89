"""Submissions behind a long queue, and empty jobs from submission to end."""

import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.daemon import QUEUED, occupied, order, queue, running
from benchmarks.figures import Figure
from benchmarks.timing import seconds

JOBS = 300


def submissions() -> Iterator[Figure | str]:
    """Measure a submission with an empty queue, and with 10,000 queued jobs."""
    with running() as daemon, occupied(daemon):
        client, wanted = daemon.client(), order("true")

        def one_s() -> float:
            return statistics.median(seconds(lambda: client.submit(wanted)) for _ in range(50))

        first = one_s()
        total = seconds(lambda: queue(daemon))
        yield f"{QUEUED} jobs queued in {total:.0f} s, {QUEUED / total:.0f} a second"
        yield Figure(
            f"one submission behind {QUEUED}", one_s() * 1e3, "ms", 1.1, first * 1e3, "behind none"
        )
        yield f"resident memory of the daemon {daemon.resident_mib():.0f} MiB"


def launches() -> Iterator[str]:
    """Measure empty jobs from submission to end, compared with starting as many processes."""
    with running() as daemon:
        wanted = order("true")
        begun, used = time.perf_counter(), daemon.cpu_s()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: daemon.client().submit(wanted), range(JOBS)))
        client = daemon.client()
        while client.status().jobs:
            time.sleep(0.02)
        ours, used = time.perf_counter() - begun, daemon.cpu_s() - used
        plain = seconds(lambda: [subprocess.run(["true"], check=True) for _ in range(JOBS)])
        yield (
            f"{JOBS} jobs: {JOBS / ours:.0f} a second, each at the price of "
            f"{ours / plain:.1f} plain processes, {used / JOBS * 1e3:.1f} ms of CPU"
        )
