"""Submissions behind a long queue."""

import statistics
from collections.abc import Iterator

from benchmarks.daemon import QUEUED, occupied, order, queue, running
from benchmarks.figures import Figure
from benchmarks.timing import seconds


def run() -> Iterator[Figure | str]:
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
