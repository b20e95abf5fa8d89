"""Memory of the daemon and of the processes that it keeps: at rest, and after a long queue."""

import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.daemon import QUEUED, Running, occupied, order, queue, running
from benchmarks.figures import Figure
from benchmarks.jobs import submit_all, until_ended
from benchmarks.processes import ProcessGroup
from gpulease.wire.requests import CancelJobsRequest

SETTLES_S = 5
MOST_FRESH_MIB, MOST_MIB, MOST_LATER_MIB = 52, 64, 60
JOBS = 1000
_BARE = "import asyncio, sys; print(flush=True); sys.stdin.read()"


def run() -> Iterator[Figure | str]:
    """Measure the memory before and after one job, after many, and after a long queue."""
    yield f"for comparison, a Python that has imported asyncio: {bare_mib():.1f} MiB"
    with running() as daemon:
        time.sleep(SETTLES_S)
        fresh = daemon.pss_mib()
        yield Figure("memory (PSS), all processes, before a job", fresh, "MiB", MOST_FRESH_MIB)
        run_one(daemon)
        time.sleep(SETTLES_S)
        at_rest = daemon.pss_mib()
        yield Figure("memory at rest (PSS), all processes, after a job", at_rest, "MiB", MOST_MIB)
        submit_all(daemon.socket, JOBS)
        until_ended(daemon, JOBS + 1)
        time.sleep(SETTLES_S)
        later = daemon.pss_mib()
        yield Figure(f"the same, after {JOBS} jobs", later, "MiB", MOST_LATER_MIB)
        with occupied(daemon):
            queue(daemon)
            daemon.client().jobs_json()
            daemon.client().cancel_all(CancelJobsRequest(name="true"))
        time.sleep(SETTLES_S)
        what = f"memory after {QUEUED} queued jobs and a list of all, all processes"
        yield Figure(what, daemon.pss_mib(), "MiB", 1.5, at_rest, "before them")


def run_one(daemon: Running) -> None:
    """Run a job: the spawner starts with the first one."""
    client = daemon.client()
    number = client.submit(order("true")).id
    while client.job(number).state != "ended":
        time.sleep(0.02)


def bare_mib() -> float:
    command = [sys.executable, "-c", _BARE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = ProcessGroup(process.pid, None).pss_mib()
        process.communicate()
    return found
