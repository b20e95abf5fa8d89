"""The time from a job's exceeding its lease to the notice in its log."""

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.daemon import order, running
from gpulease.client import Client

MIB = 1 << 20
TIMES = 10
PERIOD_S = 1.0
"""The daemon's default `sample_every`."""
JOB = """
import sys, time
within = b"x" * (600 << 20)
time.sleep(float(sys.argv[1]))
print(time.time(), flush=True)
over = b"x" * (100 << 20)
time.sleep(3600)
"""
"""With a lease of 400M and the default tolerance of 256M it is over after the line."""


def run() -> Iterator[str]:
    """Measure in sampling periods; on average the next sample is half a period away."""
    reactions = []
    with running("1x80G") as daemon, tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "grows.py"
        program.write_text(JOB)
        client = daemon.client()
        for number in range(TIMES):
            # At another moment of the period each time.
            wait = str(0.5 + number / TIMES * PERIOD_S)
            job = client.submit(order(sys.executable, str(program), wait, memory=400 * MIB)).id
            reactions.append(_reaction(client, job) / PERIOD_S)
            client.cancel(job, grace=0)
    reactions.sort()
    yield (
        f"from crossing to warning, {TIMES} jobs: {reactions[len(reactions) // 2]:.2f} sampling "
        f"periods in the median, {reactions[-1]:.2f} at most"
    )


def _reaction(client: Client, job: int) -> float:
    """Return the seconds from the time that the job reports to the notice in its log."""
    while not (place := client.job(job).directory):
        time.sleep(0.01)
    directory = Path(place)
    while not (directory / "stderr").exists() or not (directory / "stderr").read_text():
        time.sleep(0.005)
    told = time.time()
    crossed = re.match(r"[\d.]+", (directory / "stdout").read_text())
    assert crossed is not None, "it was told before it crossed"
    return told - float(crossed.group())
